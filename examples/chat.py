"""A conversation that keeps its keys and values from turn to turn; the answers are those of a fresh start."""

import aquiline

model = aquiline.load("smollm2")
session = model.chat(system="Answer in one short sentence.")
for question in ("What is a glacier?", "Where is the largest one?"):
    print(f"> {question}")
    for event in session.stream(question, max_new_tokens=32):
        print(event.text, end="", flush=True)
    print()

*conversation, answer = session.messages
fresh = model.generate(conversation, max_new_tokens=32)
print("identical to a fresh start:", fresh.text == answer["content"])
