"""Chat templates that print the formats of well-known model families.

Written for these tests after the published formats; each shows what a mask can trip over:
trimmed contents, a system prompt inside the first user turn, roles renamed or refused, an
end-of-turn that is no token of the tokenizer, text that depends on the contents.
"""

LLAMA2 = """\
{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}
  {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
  {%- if turn.role == 'user' -%}
    {{- '<s>[INST] ' + (system if loop.first else '') + turn.content.strip() + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + turn.content.strip() + ' </s>' -}}
  {%- endif -%}
{%- endfor -%}
"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for turn in messages -%}
  {{- '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' -}}
  {{- turn.content | trim -}}
  {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

VICUNA = """\
{%- if messages[0].role == 'system' -%}
  {{- messages[0].content + ' ' -}}
{%- else -%}
  {{- 'A chat between a curious user and an assistant. ' -}}
{%- endif -%}
{%- for turn in messages -%}
  {%- if turn.role == 'user' -%}
    {{- 'USER: ' + turn.content.strip() + ' ' -}}
  {%- elif turn.role == 'assistant' -%}
    {{- 'ASSISTANT: ' + turn.content.strip() + '</s>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""

CHATML = """\
{%- for turn in messages -%}
  {{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Thinking of earlier answers is left out; the last answer shows its own, or an empty one.
QWEN3 = """\
{%- set last = namespace(query=0) -%}
{%- for turn in messages -%}
  {%- if turn.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for turn in messages -%}
  {{- '<|im_start|>' + turn.role + '\\n' -}}
  {%- set answer = turn.content -%}
  {%- set thoughts = '' -%}
  {%- if turn.role == 'assistant' and '</think>' in answer -%}
    {%- set thoughts = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
    {%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {%- if turn.role == 'assistant' and loop.index0 > last.query -%}
    {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' + answer.lstrip('\\n') -}}
  {%- else -%}
    {{- answer -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

GEMMA = """\
{{- '<bos>' -}}
{%- if messages[0].role == 'system' -%}
  {{- raise_exception('System role not supported') -}}
{%- endif -%}
{%- for turn in messages -%}
  {{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' -}}
  {{- turn.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# Thoughts have a field of their own, and a setting puts an empty thought into the generation prompt.
QWEN3_FIELDS = QWEN3.replace(
    "{%- set thoughts = '' -%}", "{%- set thoughts = turn.reasoning_content if turn.reasoning_content else '' -%}"
).replace(
    "'<|im_start|>assistant\\n' -}}{%- endif -%}",
    "'<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking "
    "else '') -}}{%- endif -%}",
)

# The generation prompt opens a thought.
OPENS_THOUGHT = QWEN3.replace(
    "'<|im_start|>assistant\\n' -}}{%- endif -%}", "'<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
)

TOOLS = """\
{%- if tools -%}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}
{%- for turn in messages -%}
  {{- '<|im_start|>' + turn.role + '\\n' + turn.content -}}
  {%- for call in turn.tool_calls or [] -%}{{- '<call>' + call.function | tojson -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

NO_END_OF_TURN = """\
{%- for turn in messages -%}{{- '<|im_start|>' + turn.role + '\\n' + turn.content -}}{%- endfor -%}
"""

# name: (template, its special tokens, text before an answer, text after it)
FAMILIES = {
    "llama2": (LLAMA2, ("<s>", "</s>"), " [/INST] ", " </s>"),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "vicuna": (VICUNA, ("<s>", "</s>"), "ASSISTANT: ", "</s>"),
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3": (QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_start|>assistant\n", "<|im_end|>"),
    "gemma": (
        GEMMA,
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<start_of_turn>model\n",
        "<end_of_turn>",
    ),
}
