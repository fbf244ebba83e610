"""The kit's own chat template: ChatML with generation blocks, and with tools in the form Hermes and Qwen made common.

A chat without tools is written as ChatML always was; tools stand in the system turn, calls in the assistant's turn, and
results, which no role of ChatML is for, in a user's turn.
"""

from __future__ import annotations

_TOOLS_TEXT = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n\\nThese functions can be called:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nTo call one, write its name and its arguments as one JSON object between these tags:\\n"
    '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
)
_ANSWER = (
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] }}"
    "{% if 'tool_calls' in message and message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
)
_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)

CHATML = (
    f"{_TOOLS_TEXT}{{% for message in messages %}}"
    f"{{% if message['role'] == 'assistant' %}}{_ANSWER}"
    f"{{% elif message['role'] == 'tool' %}}{_RESULT}"
    "{% elif message['role'] not in ['system', 'user'] %}{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% elif not tools or not loop.first or message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template behind `data.template: chatml`."""
