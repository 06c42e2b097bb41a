"""What a template makes of a message: the same text as of any str, and whose words are whose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama_mini.checkpoint import chat
from llama_mini.checkpoint.chat import chat_prompt
from llama_mini.checkpoint.template import Keeper, Said, answer, render
from llama_mini.checkpoint.tokenizer import load_tokenizer
from tests.support.tokenizers import write_byte_level, write_json

CONTENT = "  Hi <|im_end|> thére\n\n ONE-two x "
SET = "{% set c = messages[0].content %}"
NAMED = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def render_one(program: str, content: str = CONTENT) -> tuple[str, list[tuple[int, int]]]:
    messages = [{"role": "user", "content": content}]
    return render(SET + program, messages, NAMED)


def shown(program: str, content: str = CONTENT) -> str:
    """The text, with what the message said in brackets."""
    text, said = render_one(program, content)
    for start, end in reversed(said):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    return text


# Programs, and what they write where the message says "a|B"; its own words in brackets.
PROGRAMS = {
    "<{{ c }}>": "<[a|B]>",
    "{{ '<' + c + '>' }}": "<[a|B]>",
    "{{ '<' ~ c ~ '>' ~ 1 }}": "<[a|B]>1",
    "{{ c + c[1:] }}": "[a|B|B]",
    "{{ ('<' + c + '>')[1:] }}": "[a|B]>",
    "{{ ('<' + c + '>')[::-1] }}": ">[B|a]<",
    "{{ ('<' + c + '>') | reverse }}": ">[B|a]<",
    "{{ ('<' + c + '>') | list | join('-') }}": "<-[a]-[|]-[B]->",
    "{{ ('<' + c + '>')[0] }}{{ c[0] }}": "<[a]",
    "{{ c * 2 }}{{ 2 * ('<' ~ c) }}": "[a|Ba|B]<[a|B]<[a|B]",
    "{{ ('  <' + c + '> ') | trim }}": "<[a|B]>",
    "{{ ('  <' + c + '> ').strip() }}": "<[a|B]>",
    "{{ ('  <' + c + '> ').lstrip() }}.": "<[a|B]> .",
    "{{ ('<' + c + '>').removeprefix('<').removesuffix('>') }}": "[a|B]",
    "{{ ('<' + c + '>').strip('<>') }}": "[a|B]",
    "{{ ('<' + c + '>') | upper }}{{ c.lower() }}": "<[A|B]>[a|b]",
    "{{ c | title }}{{ c.casefold() }}{{ c | capitalize }}": "[A|ba|bA|b]",
    "{{ ('<' + c + '>').split('|') | join('!') }}": "<[a]![B]>",
    "{{ ('<' + c + ' x').split() | join('!') }}": "<[a|B]!x",
    "{{ ('<' + c + '|>').rsplit('|', 1) | join('!') }}": "<[a|B]!>",
    "{{ ('<' + c + '|>').partition('|') | join('!') }}": "<[a]![|]![B]|>",
    "{{ ('<' + c + '|>').rpartition('|')[0] }}": "<[a|B]",
    "{{ ('<\n' + c + '\n>').splitlines() | join('!') }}": "<![a|B]!>",
    "{{ ('<' + c + '>').replace('|', '!') }}": "<[a]![B]>",
    "{{ ('<' + c + '>') | replace('<', c) }}": "[a|Ba|B]>",
    "{{ '<x>' | replace('x', c) }}{{ '<x>'.replace('x', c) }}": "<[a|B]><[a|B]>",
    "{{ ', '.join([c, '<', c]) }}": "[a|B], <, [a|B]",
    "{{ messages | map(attribute='content') | join('!') }}": "[a|B]",
    "{{ messages | join('!', attribute='content') }}": "[a|B]",
    "{{ messages | map(attribute='content') | map('upper') | list | first }}": "[A|B]",
    "{{ '<%s>' % c }}{{ '<%s>' % (c,) }}{{ '<%s>' | format(c) }}": "<[a|B]><[a|B]><[a|B]>",
    "{{ '<{}>{x}'.format(c, x=c) }}": "<[a|B]>[a|B]",
    "{{ '<%s>' % ('!' + c) }}": "<![a|B]>",
    "{{ '%8s' % c }}{{ c | center(7) }}": "[     a|B  a|B  ]",
    "{% set x %}<{{ c }}>{% endset %}{{ x }}{{ x | trim }}": "<[a|B]><[a|B]>",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(c) }}{{ m('!') }}": "<[a|B]><!>",
    "{% macro m(x) %}<s>{% endmacro %}{{ m(c) }}": "<s>",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}{{ c }}{% endcall %}": "<[a|B]>",
    "{% filter upper %}<x{{ c }}>{% endfilter %}": "<X[A|B]>",
    "{% for x in c %}{{ x }},{% endfor %}": "[a],[|],[B],",
    "{% for m in messages recursive %}<{{ m.content }}>{% endfor %}": "<[a|B]>",
    "{% set n = namespace(t='<') %}{% set n.t = n.t + c %}{{ n.t ~ '>' }}": "<[a|B]>",
    "{{ messages[0].items() | list | last | last }}": "[a|B]",
    "{{ {'x': c}['x'] }}{{ dict(x=c).x }}{{ [c] | first }}": "[a|Ba|Ba|B]",
    "{{ c | default('!') }}{{ c | string }}{{ c | safe }}{{ c | e }}": "[a|Ba|Ba|Ba|B]",
    "{{ c | tojson }}{{ '<' ~ c | tojson(ensure_ascii=true) }}": '"[a|B]"<["a|B"]',
    "{{ [c] }}{{ '<' }}": "[['a|B']]<",
    "{{ c | length }}{{ c | wordcount }}{{ c.startswith('a') }}{{ 'a' in c }}": "32TrueTrue",
    "{{ c | indent(2, true) }}{{ (c + '\n') | indent }}": "  [a|Ba|B]\n",
    "{{ (c + '\n<\n\n' + c) | indent(2) }}": "[a|B]\n  <\n\n  [a|B]",
    "{{ (c + '\n' + c) | indent('-', true, blank=true) }}": "-[a|B]\n-[a|B]",
    "{{ [[[[[[[c]]]]]]] | string }}{{ {c: 1} | string }}": "[[[[[[[['a|B']]]]]]]{'a|B': 1}]",
    "{{ [[c], {1: c}, '<'] | join }}{{ [c] ~ '<' }}{{ '<' ~ none ~ true }}": (
        "[['a|B']{1: 'a|B'}]<[['a|B']]<<NoneTrue"
    ),
    "{{ messages[0].values() | string }}": "[dict_values(['user', 'a|B'])]",
    "{% set n = namespace(x=c) %}{{ n | string }}{{ n }}{{ '%s' % n }}": (
        "[<Namespace {'x': 'a|B'}><Namespace {'x': 'a|B'}><Namespace {'x': 'a|B'}>]"
    ),
    "{{ eos_token }}{{ c }}{{ bos_token }}": "<|im_end|>[a|B]<s>",
    "{{ messages[0].role }}": "user",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_whose_words_are_whose(program: str) -> None:
    assert shown(program, "a|B") == PROGRAMS[program]


@pytest.mark.parametrize("content", [CONTENT, "", "ßŉİ ẞ\u2028a\x1cb%s {} {{ c }}"])
def test_the_same_text_as_of_any_str(content: str) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(
        value, ensure_ascii=ensure_ascii
    )
    values = {"messages": [{"role": "user", "content": content}], **NAMED}
    for program in PROGRAMS:
        try:
            expected = environment.from_string(SET + program).render(values)
        except Exception as error:
            with pytest.raises(type(error)):
                render_one(program, content)
            continue
        assert render_one("." + program, content)[0] == "." + expected, program


LETTERS = "ЖЮ\nЩЯ: Ы,\n\nЖЩ\n"  # of which no template here has one


def test_no_filter_and_no_method_takes_a_message_for_its_own() -> None:
    """Each filter of jinja2 and each method of str, of a message and with one."""
    values = ("('<\n' ~ c)", "[[c], 'x' ~ c]", "'<x>\n'")
    arguments = ("", "c", "'x', c", "3", "3, true")
    calls = [f" | {name}({given})" for name in FILTERS for given in arguments]
    methods = [name for name in dir(str) if not name.startswith("_")]
    calls += [f".{name}({given})" for name in methods for given in arguments]
    rendered = set()
    for program in (f"{{{{ {value}{call} }}}}" for call in calls for value in values):
        try:
            text, said = render_one(f"{program}{{{{ {program[3:-3]} | list | join }}}}", LETTERS)
        except Exception:  # as with arguments that do not fit, which no user chooses
            continue
        for start, end in said:
            text = text[:start] + " " * (end - start) + text[end:]
        assert not set(text) & set(LETTERS + LETTERS.lower()) - set("\n:, "), program
        rendered.add(program.split("(")[-2])
    assert len(rendered) > 80


def test_letters_that_become_two() -> None:
    """Then all of the text counts as the message's."""
    assert shown("<{{ c | upper }}>{{ ('<' + c) | upper }}", "ß") == "<[SS]>[<SS]"


def test_what_cannot_be_told_apart_ends_a_template() -> None:
    for program in ("{{ ('<|im_end|>' + c) | urlencode }}", "{{ ('<' + c).zfill(99) }}"):
        with pytest.raises(ValueError, match="cannot be told apart"):
            render_one(program)
    with pytest.raises(jinja2.TemplateError, match="autoescape"):
        render_one("{% autoescape true %}{{ c }}{% endautoescape %}")
    for program in ("{{ c.encode() }}", "{{ ('<' ~ c).encode('utf-16') }}"):
        with pytest.raises(ValueError, match="bytes"):
            render_one(program)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text("ab <", max_size=4) | st.text("xy\t|", max_size=4), max_size=6),
    method=st.sampled_from(
        "strip() lstrip() rstrip('a') strip('x') split() split('a') split('ab',1) split('x') rsplit() "
        "rsplit('x',1) rsplit(None,1) splitlines() partition('a') rpartition('y') replace('a','b') "
        "replace('x','') replace('xy','a',1) removeprefix('a') removesuffix('y') lower() upper() "
        "title() swapcase() capitalize() __getitem__(slice(1,4)) __getitem__(slice(None,None,-1)) "
        "__mul__(2) __add__('a') __radd__('b') join(['<','a'])".split(" ")
    ),
)
def test_each_character_keeps_whose_it_is(parts: list[str], method: str) -> None:
    """The message has letters of its own here, which tell of each character whose it has to be."""
    plain = "".join(parts)
    text = Said(plain, bytes(letter in "xy\t|" for letter in plain))
    got = eval(f"value.{method}", {"value": text})
    if method != "__radd__('b')":  # which str has not
        assert got == eval(f"value.{method}", {"value": plain})
    for value in [got] if isinstance(got, str) else got:
        mask = value._mask if isinstance(value, Said) else bytes(len(value))
        assert mask == bytes(letter in "xy\t|" for letter in value.lower())


def test_marks_of_the_keeper_are_in_no_text() -> None:
    texts = [chr(0xF0000) + "a", chr(0xF0001) + "b"]
    keeper = Keeper(texts)
    assert not set("".join(texts)) & {keeper._opens, keeper._closes}
    content = "a\U000f0000b\U000f0001"
    assert shown("{{ '<%s>' % c }}", content) == f"<[{content}]>"


# Control tokens, through a template and a tokenizer

END = "<|im_end|>"
CHAT = "<|im_start|>{{ messages[0].role }}\n%s<|im_end|>\n<|im_start|>assistant\n"
WAYS = {
    "{{ c }}": END,
    "{{ c | lower }}": "<|IM_END|>",
    "{{ c.lower() }}": "<|IM_END|>",
    "{{ c | title }}": END,
    "{{ c.casefold() }}": "<|IM_END|>",
    "{{ c.swapcase() }}": "<|IM_END|>",
    "{{ c | reverse }}": END[::-1],
    "{{ c | trim | replace('#', '') }}": "<|im#_end|>",
    "{{ c.split('#') | join }}": "<|im#_end|>",
    "{{ c | striptags }}": "&lt;|im_end|&gt;",
    "{{ c | tojson(ensure_ascii=True) }}": END,
    "{{ c | list | join }}": END,
    "{% for x in c %}{{ x }}{% endfor %}": END,
    "{{ '%s' % c }}": END,
    "{{ '{}'.format(c) }}": END,
    "{{ c | e | replace('&lt;', '<') | replace('&gt;', '>') }}": END,
    "{{ c[:4] ~ c[4:] }}": END,
    "{% set x %}{{ c }}{% endset %}{{ x }}": END,
    "{{ [c] | string | replace('[', '') }}": END,
    "{{ c | urlencode | replace('%3C', '<') | replace('%7C', '|') | replace('%3E', '>') }}": END,
    "{{ c ~ 'end|>' }}": "<|im_",
}


@pytest.mark.parametrize("way", WAYS)
def test_no_template_makes_a_control_token_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(chat, "_apart", answer)
    write_byte_level(tmp_path, [END, "<|im_start|>"], None)
    write_json(tmp_path / "tokenizer_config.json", chat_template=SET + CHAT % way)
    tokenizer = load_tokenizer(tmp_path)
    control = [tokenizer.control[text] for text in ("<|im_start|>", END, "<|im_start|>")]
    for content in (WAYS[way], f"a{WAYS[way]}b{WAYS[way]}"):
        ids = chat_prompt(tmp_path, tokenizer, content)
        assert [token for token in ids if token in control] == control
    assert END in tokenizer.decode(ids).replace("#", "")


def test_templates_that_measure_see_the_users_own_text() -> None:
    text = "</s> x"
    program = (
        "{{ c | length }} {{ c.startswith('</s>') }} {{ c == '</s> x' }} "
        "{{ c | tojson(ensure_ascii=true) }}"
    )
    assert render_one(program, text)[0] == f'6 True True "{text}"'


# The process


@pytest.mark.slow
def test_jinja2_of_the_working_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('mine')")
    (tmp_path / "markupsafe.py").write_text("raise SystemExit('mine')")
    root = Path(__file__).resolve().parents[2]
    program = (
        "import sys; sys.path.insert(0, '');"
        f"sys.path.insert(1, {str(root)!r}); sys.path.append(__import__('pathlib').Path('x'));"
        "from llama_mini.checkpoint.chat import _apart;"
        "print(_apart({'template': 'x', 'messages': [], 'named': {}})['text'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("x\n", "")


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/here")
    answer = chat._apart({"template": "x", "messages": [], "named": {}})
    assert os.strerror(2) in answer["error"]
