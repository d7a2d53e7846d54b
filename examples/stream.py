"""Text as it comes, sampled with a seed, up to a stop string."""

import aquiline

model = aquiline.load("smollm2")
settings = aquiline.SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.95, seed=7, stop=("\n\n",))
for event in model.stream("Write the first sentence of a story about a lighthouse.", settings):
    print(event.text, end="", flush=True)
    if event.output is not None:
        print(f"\n[{event.finish_reason} after {event.output.stats.emitted} tokens]")
