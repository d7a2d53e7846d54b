"""Text as it arrives, sampled with a seed, up to a stop string; the seed gives the same text again."""

import aquiline

model = aquiline.load("smollm2")
settings = aquiline.SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.95, seed=7, stop=("\n\n",))
prompt = "Write the first sentence of a story about a lighthouse."
for event in model.stream(prompt, settings):
    print(event.text, end="", flush=True)
    if event.output is not None:
        print(f"\n[{event.finish_reason} after {event.output.stats.emitted} tokens]")
        print("identical without drafts:", model.plain().generate(prompt, settings).token_ids == event.output.token_ids)
