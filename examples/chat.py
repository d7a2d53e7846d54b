"""A conversation that keeps its keys and values from turn to turn."""

import aquiline

session = aquiline.load("smollm2").chat(system="Answer in one short sentence.")
for question in ("What is a glacier?", "Where is the largest one?"):
    print(f"> {question}")
    for event in session.stream(question, max_new_tokens=32):
        print(event.text, end="", flush=True)
    print()
