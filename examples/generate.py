"""One answer with drafts, and the same one without."""

import aquiline

model = aquiline.load("smollm2")
output = model.generate("Why is the sky blue?", max_new_tokens=48)
print(output.text)
print(f"{output.stats.mean_accept_length:.2f} tokens per forward, ended by {output.finish_reason}")

plain = model.plain().generate("Why is the sky blue?", max_new_tokens=48)
print("identical:", plain.token_ids == output.token_ids)
