"""A model loaded with transformers, accelerated without a draft head; the model itself is not modified."""

import torch
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

reference = hf_model.generate(torch.tensor([output.prompt_tokens]), max_new_tokens=48, do_sample=False)
print("identical to transformers:", reference[0, len(output.prompt_tokens) :].tolist() == output.token_ids)
