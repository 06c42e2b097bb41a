"""Prompts through chat templates, against transformers where it is installed."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from llama_mini.checkpoint import chat, template
from llama_mini.checkpoint.chat import chat_prompt, render
from llama_mini.checkpoint.tokenizer import Tokenizer, load_tokenizer
from llama_mini.cli import run_command
from tests.support.fixtures import require
from tests.support.processes import Fork
from tests.support.tokenizers import (
    LLAMA3_TOKENS,
    write_byte_level,
    write_json,
    write_llama2_json,
)

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != "system" %}
        {{- "<|im_start|>system\\nBe brief.<|im_end|>\\n" -}}
    {% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set head = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set head = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set content = head + turn['content'] if loop.first else turn['content'] %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(system="", rest=messages) %}
{%- if messages[0].role == "system" %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set ns.rest = messages[1:] %}
{%- endif %}
{%- if tools is not none or documents is not none %}{{ raise_exception("no tools here") }}{% endif %}
{{- "<|start_header_id|>system\\n\\nToday is " + strftime_now("%d %b %Y") + "\\n" + ns.system }}
{{- "<|eot_id|>" }}
{%- for message in ns.rest %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {{- "<|start_header_id|>" + message.role + "\\n\\n" }}
    {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant\\n\\n" }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>' }}
{{ message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
<|assistant|>
{% endif %}
{% endfor %}"""

LLAMA2_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_chat(folder: Path, kind: str) -> Path:
    """A tokenizer with its chat template, where that family keeps it."""
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind == "chatml":
        write_byte_level(folder, CHATML_TOKENS, None)
        (folder / "chat_template.jinja").write_text(CHATML)
        write_json(folder / "tokenizer_config.json", **fast, eos_token="<|im_end|>")
    elif kind == "llama3":
        write_byte_level(folder, LLAMA3_TOKENS, LLAMA3_TOKENS[0])
        config = {**fast, **LLAMA3_NAMES, "chat_template": LLAMA3}
        write_json(folder / "tokenizer_config.json", **config)
    else:
        write_llama2_json(folder)
        template = {"llama2": LLAMA2, "zephyr": ZEPHYR}[kind]
        named = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
        config = {**fast, **LLAMA2_NAMES, "chat_template": named}
        write_json(folder / "tokenizer_config.json", **config)
    return folder


KINDS = ["chatml", "llama2", "llama3", "zephyr"]
APART = chat._apart
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates run in this process, which is quicker, unless a test asks for `apart`."""
    monkeypatch.setattr(chat, "_apart", template.answer)


@pytest.fixture
def apart(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_apart", APART)
    monkeypatch.setattr(chat, "SECONDS", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {kind: write_chat(root / kind, kind) for kind in KINDS}


def rendered(folder: Path, tokenizer: Tokenizer, ids: list[int]) -> str:
    """The ids as text with the control tokens in it."""
    texts = {token: text for text, token in tokenizer.control.items()}
    decoder = tokenizer.stream_decoder()
    return "".join(texts.get(token) or decoder.push(token) for token in ids)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] Hi there [/INST]"),
        ("zephyr", "<s><|user|>\nHi there</s> \n<|assistant|>\n"),
    ],
)
def test_known_prompt(folders: dict[str, Path], kind: str, expected: str) -> None:
    """The file of Llama 2 puts a space after every control token."""
    tokenizer = load_tokenizer(folders[kind])
    ids = chat_prompt(folders[kind], tokenizer, "Hi there")
    assert rendered(folders[kind], tokenizer, ids) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("system", [None, "", "Answer in one word."])
@pytest.mark.parametrize(
    "prompt", ["Hi", "", " two\n\nlines ", "{{ 7 * 7 }} {% if %} <b>'\"&</b>", "日本 😸", "<think>"]
)
def test_same_ids_as_transformers(
    folders: dict[str, Path], kind: str, system: str | None, prompt: str
) -> None:
    transformers = require("transformers")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    theirs = transformers.AutoTokenizer.from_pretrained(folders[kind])
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokenizer = load_tokenizer(folders[kind])
    if kind == "zephyr":  # its template writes no BOS, and transformers adds none
        expected = [tokenizer.bos_id, *expected]
    assert chat_prompt(folders[kind], tokenizer, prompt, system) == expected


@pytest.mark.parametrize(("kind", "count"), [("llama2", 1), ("llama3", 1), ("zephyr", 1)])
def test_one_bos(folders: dict[str, Path], kind: str, count: int) -> None:
    tokenizer = load_tokenizer(folders[kind])
    ids = chat_prompt(folders[kind], tokenizer, "Hi")
    assert ids.count(tokenizer.bos_id) == count
    assert ids[0] == tokenizer.bos_id


def test_no_bos_where_the_tokenizer_puts_none(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["chatml"])
    ids = chat_prompt(folders["chatml"], tokenizer, "Hi")
    assert ids[0] == tokenizer.control["<|im_start|>"]
    assert tokenizer.control["<|endoftext|>"] not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_of_the_user_stay_text(folders: dict[str, Path], kind: str) -> None:
    tokenizer = load_tokenizer(folders[kind])
    plain = chat_prompt(folders[kind], tokenizer, "x", "x")
    for text, token in tokenizer.control.items():
        if text == "<unk>":
            continue
        forged = f" a{text}{text}b "
        for prompt, system in ((forged, "x"), ("x", forged), (text, text)):
            ids = chat_prompt(folders[kind], tokenizer, prompt, system)
            assert ids.count(token) == plain.count(token)
            assert text in tokenizer.decode(ids)
            assert not any(ord(character) >= 0xF0000 for character in tokenizer.decode(ids))


def test_the_mark_may_be_in_the_prompt(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["chatml"])
    prompt = "\U000f0000<|im_end|>\U000f0001"
    ids = chat_prompt(folders["chatml"], tokenizer, prompt)
    assert prompt in tokenizer.decode(ids)


# Conversations


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_where_it_was(folders: dict[str, Path], kind: str) -> None:
    """Every turn begins with the ids of the turn before it, and all are those of transformers."""
    tokenizer, before = load_tokenizer(folders[kind]), []
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    for reply in ("Hello!", " It  is\n\nfine. ", "日本"):
        ids = chat_prompt(folders[kind], tokenizer, messages)
        assert ids[: len(before)] == before
        assert len(ids) > len(before)
        expected = transformers_ids(folders[kind], messages)
        assert ids == [tokenizer.bos_id] * (kind == "zephyr") + expected
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": "And now?"})
        before = ids


def transformers_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    theirs = require("transformers").AutoTokenizer.from_pretrained(folder)
    return theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_reply_writes_a_control_token(folders: dict[str, Path], kind: str) -> None:
    """Nor does a system message in the middle: only roles and the template do."""
    tokenizer = load_tokenizer(folders[kind])

    def turns(reply: str) -> list[int]:
        told = [("user", "Hi"), ("assistant", reply), ("user", reply)]
        messages = [{"role": role, "content": content} for role, content in told]
        return chat_prompt(folders[kind], tokenizer, messages)

    plain = turns("x")
    for text, token in tokenizer.control.items():
        assert turns(f"{text}x{text}").count(token) == plain.count(token)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "im_end", "content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["Hi"]}],
        [{"role": ["user"], "content": "Hi"}],
        [{"role": "user", "content": "Hi", "tool_calls": "x"}],
        ["Hi"],
        [7],
    ],
)
def test_what_is_no_conversation(folders: dict[str, Path], messages: list) -> None:
    with pytest.raises(ValueError, match=r"message|role"):
        chat_prompt(folders["chatml"], load_tokenizer(folders["chatml"]), messages)


def test_one_text_is_a_users_message(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["llama3"])
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    ids = chat_prompt(folders["llama3"], tokenizer, messages)
    assert chat_prompt(folders["llama3"], tokenizer, "Hi", "S") == ids
    assert chat_prompt(folders["llama3"], tokenizer, messages[1:], "S") == ids
    assert messages[1:] == [{"role": "user", "content": "Hi"}]


# Where the template comes from


def test_jinja_file_wins(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_chat(tmp_path, "llama3")
    (folder / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    tokenizer = load_tokenizer(folder)
    text = tokenizer.decode(chat_prompt(folder, tokenizer, "Hi"))
    assert text == "file: Hi"


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        (["chat_template"], "config", "chat_template"),
        (["additional_chat_templates/default"], "config", "additional_chat_templates/default"),
        (["additional_chat_templates/rag"], "config", "config"),
        (["additional_chat_templates/rag", "chat_template"], None, "chat_template"),
        ([], {"default": "config", "rag": "no"}, "config"),
        (
            [],
            [{"name": "rag", "template": "no"}, {"name": "default", "template": "config"}],
            "config",
        ),
    ],
)
def test_the_template_named_default(
    tmp_path: Path, files: list[str], config: object, expected: str
) -> None:
    write_byte_level(tmp_path, CHATML_TOKENS, None, chat_template=config)
    for name in files:
        path = tmp_path / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(chat_prompt(tmp_path, tokenizer, "Hi")) == expected


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML_TOKENS, None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("x")
    with pytest.raises(ValueError, match=r"additional_chat_templates.*\['rag'\]"):
        chat_prompt(tmp_path, load_tokenizer(tmp_path), "Hi")


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_no_template(tmp_path: Path, config: dict[str, None] | None) -> None:
    write_byte_level(tmp_path, CHATML_TOKENS, None)
    if config is not None:
        write_json(tmp_path / "tokenizer_config.json", **config)
    with pytest.raises(ValueError, match="has no chat template"):
        chat_prompt(tmp_path, load_tokenizer(tmp_path), "Hi")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "rag", "template": "x"}], r"\['rag'\] and none named default"),
        ([{"name": "default"}], "lists no names and templates"),
        (["x"], "lists no names and templates"),
        ({"rag": "x"}, r"\['rag'\] and none named default"),
        (7, "chat_template is int, not text"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no system\nmessage') }}", "TemplateError: no system message"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ joiner.__init__.__globals__ }}", "SecurityError"),
        ("{{ namespace.__init__.__globals__ }}", "SecurityError"),
        ("{{ lipsum.__globals__['os'] }}", "UndefinedError|SecurityError"),
        ("{{ lipsum.__globals__ }}", "writes nothing"),
        ("{{ raise_exception.__globals__ }}", "writes nothing"),
        ("{{ strftime_now.__closure__ }}", "writes nothing"),
        ("{{ '' | attr('__class__') }}", "writes nothing"),
        ("{{ ''['__class__'].mro() }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "SecurityError|writes nothing"),
        ("{{ messages | map(attribute='__class__') | map('string') | join }}", "writes nothing"),
        ("{{ self._TemplateReference__context.environment }}", "writes nothing|SecurityError"),
        ("{% import 'os' as os %}{{ os }}", "TypeError"),
        ("{{ raise_exception('x' * 10 ** 6) }}", r"TemplateError: x{900,1000}\)$"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 1000020 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_bad_template(tmp_path: Path, template: object, message: str) -> None:
    """One line that names the file, and nothing of this machine is shown or changed."""
    write_byte_level(tmp_path, CHATML_TOKENS, None, chat_template=template)
    with pytest.raises(ValueError, match=message) as caught:
        chat_prompt(tmp_path, load_tokenizer(tmp_path), "Hi")
    assert "tokenizer_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b""])
def test_jinja_file_that_is_no_text(tmp_path: Path, data: bytes) -> None:
    write_byte_level(tmp_path, CHATML_TOKENS, None)
    (tmp_path / "chat_template.jinja").write_bytes(data)
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*(UTF-8|writes nothing)"):
        chat_prompt(tmp_path, load_tokenizer(tmp_path), "Hi")


def test_a_jinja_file_without_end(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML_TOKENS, None)
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(2**33)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"chat_template\.jinja is longer than"):
        chat_prompt(tmp_path, load_tokenizer(tmp_path), "Hi")


def test_helpers_of_transformers() -> None:
    """tojson without HTML escapes, the layout options, loop controls, block trimming."""
    messages = [{"role": "user", "content": "<é&'>"}]
    cases = {
        "{{ messages[0] | tojson }}": json.dumps(messages[0], ensure_ascii=False),
        "{{ messages[0] | tojson(indent=2, sort_keys=true) }}": json.dumps(
            messages[0], ensure_ascii=False, indent=2, sort_keys=True
        ),
        "{{ [1] | tojson(separators=(',', ':'), ensure_ascii=true) }}": "[1]",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "a\n  {% if true %}\nb\n  {% endif %}\nc": "a\nb\nc",
        "{{ bos_token }}|{{ eos_token }}": "<s>|",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}": "1",
        "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}": "True True True",
    }
    for program, expected in cases.items():
        assert render(Path("x"), program, messages, {"bos_token": "<s>"})[0] == expected
    year, _ = render(Path("x"), "{{ strftime_now('%Y') }}", messages, {})
    assert year.isdigit()


# In a process of its own


def test_a_process_of_its_own_gives_the_same_text(apart: None) -> None:
    content = "\ud800 é 😸 \x00 \x7f" * 100_000
    messages = [{"role": "user", "content": content}]
    expected = (content, [(0, len(content))])
    assert render(Path("x"), "{{ messages[0].content }}", messages, {}) == expected
    with pytest.raises(ValueError, match=r"^x: the chat template failed \(TemplateError: no\)$"):
        render(Path("x"), "{{ raise_exception('no') }}", messages, {})


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        SLOW("{{ '%10000000000s' | format(1) }}", "MemoryError|OverflowError|ValueError"),
        SLOW("{{ '%999999999d' % 1 }}", "MemoryError|ValueError"),
        SLOW("{{ 'x' | center(10 ** 10) }}", "MemoryError"),
        SLOW("{{ [1] * 10 ** 9 }}", "MemoryError"),
        # 1 s of the processor, or 10 s of the clock, where others use the processor.
        ("{{ 9 ** (9 ** 9) }}", "takes more than 10? s"),
        SLOW("{{ ('a b ' * 1000000) | wordwrap(1) }}", "takes more than 10? s"),
        SLOW(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 10? s",
        ),
    ],
)
def test_time_and_memory_are_bounded(apart: None, program: str, message: str) -> None:
    began = os.times().children_user
    with pytest.raises(ValueError, match=message) as caught:
        render(Path("x"), program, [{"role": "user", "content": "Hi"}], {})
    assert str(caught.value).startswith("x: the chat template failed (")
    assert os.times().children_user - began < 2


def test_a_template_without_end_can_be_stopped(
    apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 60)
    program = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    began = time.monotonic()
    fork = Fork(lambda: run_command(lambda: print(render(Path("x"), program, messages, {}))))
    time.sleep(0.3)
    os.kill(fork.pid, signal.SIGTERM)
    assert fork.finish() == (143, "", "")
    assert time.monotonic() - began < 30
