"""Many prompts as one batch; each output is what its prompt gives alone."""

import aquiline

PROMPTS = ["One fact about bees.", "One fact about bats.", "One fact about bears.", "One fact about bulls."]

# Two decode together; the others take the slots that become free. In bfloat16, rounding may decide near-ties.
model = aquiline.load("smollm2", max_rows=2, dtype="float32")
outputs = model.generate(PROMPTS, max_new_tokens=32)
for prompt, output in zip(PROMPTS, outputs, strict=True):
    print(f"{prompt}\n  {output.text}")

alone = model.generate(PROMPTS[-1], max_new_tokens=32)
print("identical to the prompt alone:", alone.token_ids == outputs[-1].token_ids)
