"""Many prompts as one batch; each output is what the prompt gives alone."""

import aquiline

PROMPTS = ["One fact about bees.", "One fact about bats.", "One fact about bears.", "One fact about bulls."]

model = aquiline.load("smollm2", max_rows=2)  # two decode together, the others take the slots that they leave
for prompt, output in zip(PROMPTS, model.generate(PROMPTS, max_new_tokens=32), strict=True):
    print(f"{prompt}\n  {output.text}")
