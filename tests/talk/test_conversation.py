"""A conversation: turns through the template, one cache, and an end that leaves the next turn right."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama_mini import generate, load_model, load_tokenizer
from llama_mini.checkpoint import chat_prompt, open_checkpoint
from llama_mini.talk import Answer, Conversation, StopStrings

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 300}))
    return folder


@pytest.fixture
def talk(folder) -> Conversation:
    model = load_model(folder, dtype=torch.float32)
    return Conversation(open_checkpoint(folder), model, load_tokenizer(folder), "Be brief")


def widths(model) -> list[int]:
    seen: list[int] = []
    model.embed.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    return seen


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_each_answer_is_that_of_the_whole_conversation_and_only_new_tokens_are_computed(talk):
    seen = widths(talk.model)
    messages = [{"role": "system", "content": "Be brief"}]
    for n, text in enumerate(["The fox", "The dog", "Once upon"]):
        messages.append(user(text))
        ids = chat_prompt(talk.checkpoint, talk.tokenizer, messages)
        seen.clear()
        answer = talk.ask(text, max_new_tokens=12)
        said = "".join(answer)
        computed = sum(seen)
        new = generate(talk.model, [ids], 12, vocab_size=talk.tokenizer.vocab_size)[0]
        assert (answer.ids, said) == (new, talk.tokenizer.decode(new))
        messages.append({"role": "assistant", "content": said})
        assert talk.messages == messages
        assert (len(answer.prompt), answer.computed) == (len(ids), computed - len(new) + 1)
        assert answer.computed == len(ids) if n == 0 else answer.computed < len(ids) // 2


def test_an_answer_that_is_interrupted_is_what_was_said(talk):
    answer = talk.ask("The fox", max_new_tokens=20)
    pieces = iter(answer)
    said = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[1:] == [user("The fox"), {"role": "assistant", "content": said}]
    answer = talk.ask("The dog", max_new_tokens=8)
    "".join(answer)
    ids = chat_prompt(talk.checkpoint, talk.tokenizer, talk.messages[:-1])
    assert answer.ids == generate(talk.model, [ids], 8, vocab_size=300)[0]


def test_a_turn_without_an_answer_is_forgotten(talk):
    def interrupt(*_):
        raise KeyboardInterrupt

    "".join(talk.ask("The fox", max_new_tokens=3))
    before = list(talk.messages)
    hook = talk.model.final_norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        "".join(talk.ask("The dog"))
    hook.remove()
    assert talk.messages == before
    answer = talk.ask("The dog", max_new_tokens=5)  # all of it is in the cache, but its logits
    "".join(answer)
    ids = chat_prompt(talk.checkpoint, talk.tokenizer, [*before, user("The dog")])
    assert (answer.ids, answer.computed) == (generate(talk.model, [ids], 5, vocab_size=300)[0], 1)
    before = list(talk.messages)
    with pytest.raises(ValueError, match="context of 300"):
        talk.ask("The quick brown fox jumps over the lazy dog. " * 20)
    assert talk.messages == before
    answer = talk.ask("Once", max_new_tokens=5)
    "".join(answer)
    ids = chat_prompt(talk.checkpoint, talk.tokenizer, [*before, user("Once")])
    assert answer.ids == generate(talk.model, [ids], 5, vocab_size=300)[0]


def test_the_last_token_was_drawn_and_is_not_in_the_cache(talk, monkeypatch):
    said = [[5, 6, 7]]
    monkeypatch.setattr("llama_mini.talk.conversation.chat_prompt", lambda *_: list(said[-1]))
    for _ in range(3):
        answer = talk.ask("", max_new_tokens=4)
        "".join(answer)
        assert answer.ids == generate(talk.model, [said[-1]], 4, vocab_size=300)[0]
        assert answer.computed == (3 if len(said) == 1 else 2)  # the last one, and the new one
        said.append([*said[-1], *answer.ids, 9])


def test_reset_forgets_all_but_the_system_message(talk):
    "".join(talk.ask("The fox", max_new_tokens=3))
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief"}]
    answer = talk.ask("The fox", max_new_tokens=3)
    "".join(answer)
    assert answer.computed == len(answer.prompt)


def test_where_the_template_changes_an_earlier_turn_the_cache_goes_back_to_there(folder):
    # As templates do that drop what a model thought.
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content[:4] if not loop.last else m.content }}]{% endfor %}"
    )
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    talk = Conversation(open_checkpoint(folder), model, tokenizer)
    for text in ("The quick brown fox", "jumps over", "the lazy dog"):
        answer = talk.ask(text, max_new_tokens=6)
        "".join(answer)
        ids = chat_prompt(talk.checkpoint, tokenizer, talk.messages[:-1])
        assert answer.ids == generate(model, [ids], 6, vocab_size=300)[0]
    assert 0 < answer.computed < len(answer.prompt)


def answer_of(texts, stop, stop_ids, monkeypatch) -> Answer:
    class Decoder:
        def push(self, token: int) -> str:
            return texts[token]

        def flush(self) -> str:
            return "~"

    steps = ([n] for n in range(len(texts)))
    monkeypatch.setattr("llama_mini.talk.answer.stream", lambda *_, **__: steps)
    tokenizer = SimpleNamespace(vocab_size=len(texts), stream_decoder=lambda _: Decoder())
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=stop_ids))
    return Answer(model, tokenizer, [0], stop)


def test_what_ends_an_answer(monkeypatch):
    for stop, stop_ids, text, ids, ended in (
        ((), (), "abcd~", [0, 1, 2, 3], False),
        ((), (2,), "abc~", [0, 1, 2], True),
        (("cX", "c"), (), "ab", [0, 1, 2], True),
        (("bcd",), (), "a", [0, 1, 2, 3], True),
        (("d~e",), (), "abcd~", [0, 1, 2, 3], False),  # held back, and shown
        (("d~",), (), "abc", [0, 1, 2, 3], False),
    ):
        answer = answer_of(list("abcd"), stop, stop_ids, monkeypatch)
        assert "".join(answer) == answer.text == text, (stop, stop_ids)
        assert (answer.ids, answer.ended) == (ids, ended)
        assert len(answer.times) == len(ids) + 1


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stop_strings_do_not_depend_on_the_pieces(text, stops, cuts):
    def through(pieces: list[str]) -> str:
        stop, out = StopStrings(stops), ""
        for piece in pieces:
            out += stop.push(piece)
            if stop.reached:
                return out + stop.flush()
        return out + stop.flush()

    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    found = through(pieces)
    assert found == through([text])
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    assert found == (text[: min(ends)[1]] if ends else text)


def test_a_turn_that_cannot_fit_is_refused_before_it_is_encoded(talk, monkeypatch):
    monkeypatch.setattr(
        "llama_mini.talk.conversation.chat_prompt", lambda *_: pytest.fail("encoded")
    )
    with pytest.raises(ValueError, match=r"5,000,000 bytes.*context of 300"):
        talk.ask("a" * 5_000_000)
    assert talk.messages[1:] == []
