"""A model that was loaded with transformers, sped up without any head; nothing of it is modified."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import aquiline
from aquiline.models.resolve import resolve_target

folder = resolve_target("smollm2")  # any folder or hub id
hf_model = AutoModelForCausalLM.from_pretrained(folder).eval()
model = aquiline.load(hf_model, tokenizer=AutoTokenizer.from_pretrained(folder), draft="prompt-lookup")

text = "The harbour opens at six. The harbour closes at nine. The ferry leaves the harbour at seven."
output = model.generate(f"Copy this text word by word: {text}", max_new_tokens=48)
print(output.text)
print(f"{output.stats.mean_accept_length:.2f} tokens per forward")
