"""Sampling, batches, and the loop that feeds tokens back."""

import dataclasses
import math

import pytest
import torch

from llama_mini import KVCache, generate, sample, stream
from llama_mini.generation import draw
from tests.support.models import CONFIG, make

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def model():
    return make()


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2]]


def counts(logits, n=4000, **options):
    generator = torch.Generator().manual_seed(0)
    ids = sample(torch.tensor(logits).expand(n, -1), generator=generator, **options)
    return torch.bincount(ids, minlength=len(logits)) / n


def test_temperature_0_is_argmax_and_a_tiny_one_equals_it():
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(0)) * 30
    greedy = logits.argmax(-1)
    for temperature in (
        0.0,
        1e-8,
        1e-30,
        1.2e-38,
        1e-45,
        1e-46,
        5e-324,
    ):  # float32 rounds 1e-46 to 0
        assert torch.equal(sample(logits, temperature=temperature), greedy)
        assert torch.equal(sample(logits.half(), temperature=temperature), logits.half().argmax(-1))


def test_temperature_scales_the_logits():
    # Four standard deviations of 4000 draws; seen 0 with this seed, and 0.003 with others.
    share = counts([math.log(1.0), math.log(3.0)], temperature=1.0)
    assert share.tolist() == pytest.approx([0.25, 0.75], abs=0.027)
    share = counts([math.log(1.0), math.log(3.0)], temperature=0.5)
    assert share.tolist() == pytest.approx([0.1, 0.9], abs=0.019)


def test_narrow_logits_are_drawn_from_as_float32():
    logits = torch.randn(500, 97, generator=torch.Generator().manual_seed(0)).bfloat16()
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9}
    narrow, wide = (
        sample(x, **options, generator=torch.Generator().manual_seed(1))
        for x in (logits, logits.float())
    )
    assert torch.equal(narrow, wide)


def test_top_k_keeps_exactly_k_ties_included():
    for k in (1, 2, 3, 4):
        assert (counts([1.0, 1.0, 1.0, 1.0, 0.5], temperature=1.0, top_k=k) > 0).sum() == k
    assert (counts([1.0, 0.9, 0.8], temperature=1.0, top_k=99) > 0).sum() == 3


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    cases = ((0.0, 1), (1e-46, 1), (1e-8, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3))
    for top_p, kept in (*cases, (0.96, 4), (1.0, 4)):
        assert (counts(logits, temperature=1.0, top_p=top_p) > 0).sum() == kept, top_p
    assert counts(logits[::-1], temperature=1.0, top_p=1e-8)[3] == 1
    rare = [math.log(0.99), math.log(0.01)]
    assert [counts(rare, temperature=1.0, top_p=p)[1] > 0 for p in (0.98, 0.995)] == [False, True]
    assert counts([math.log(0.996), math.log(0.004)], temperature=1.0, top_p=0.995)[1] == 0


def test_top_p_0_is_greedy_and_1_changes_nothing():
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, temperature=1.0, top_p=0.0), logits.argmax(-1))
    draws = [
        sample(logits, temperature=1.0, top_p=top_p, generator=torch.Generator().manual_seed(5))
        for top_p in (None, 1.0)
    ]
    assert torch.equal(*draws)


def test_drawn_as_torch_multinomial_draws():
    logits = torch.randn(3, 997, generator=torch.Generator().manual_seed(0)) * 3
    for seed in range(20):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        ids = sample(logits, temperature=1.0, generator=generators[0])
        shares = (logits - logits.amax(-1, keepdim=True)).softmax(-1)
        theirs = torch.multinomial(shares, 1, generator=generators[1]).squeeze(-1)
        assert torch.equal(ids, theirs)


def test_a_draw_never_waits_for_the_device():
    logits = torch.randn(2, 97, device="meta")  # of which no value can be looked at
    for temperature in (0.0, 0.8):
        for top_k, top_p in ((None, None), (5, None), (None, 0.9), (5, 0.9), (None, 0.0)):
            assert draw(logits, temperature, top_k, top_p, None).shape == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"top_p": -0.1}, r"top_p is -0\.1"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_parameters_out_of_range_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(1, 5), **options)
    with pytest.raises(ValueError, match=message):
        stream(model, [[1]], **options)  # before any work, not at the first token


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_reported(bad, temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        sample(logits, temperature=temperature)


def test_minus_infinity_is_never_drawn():
    assert counts([0.0, -math.inf, 0.0], temperature=1.0)[1] == 0
    with pytest.raises(ValueError, match="NaN or infinity"):
        sample(torch.full((1, 4), -math.inf))


def test_same_seed_same_text(model):
    runs = [
        generate(model, PROMPTS, 12, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_greedy_equals_feeding_the_whole_text_again(model):
    prompt = PROMPTS[0]
    text = list(prompt)
    for _ in range(20):
        with torch.no_grad():
            text.append(model(torch.tensor([text]))[0, -1].argmax().item())
    assert generate(model, [prompt], 20) == [text[len(prompt) :]]


def test_rows_of_a_ragged_batch_equal_their_own_runs(model):
    alone = [generate(model, [prompt], 30)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, 30) == alone
    assert len({tuple(row) for row in alone}) == 4


def test_a_row_ends_with_its_stop_id_and_the_others_go_on(model):
    free = generate(model, PROMPTS, 10)
    stop = free[1][3]
    stopped = generate(model, PROMPTS, 10, stop_ids=[stop])
    for row, whole in zip(stopped, free, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert row == whole[:end]
    assert len(stopped[1]) < 10
    steps = list(stream(model, PROMPTS, 10, stop_ids=[stop]))
    assert steps[-1][1] is None


def test_stop_ids_are_the_checkpoints_own_unless_named():
    model = make()
    free = generate(model, [[3, 1, 4]], 8)[0]
    model.config = dataclasses.replace(CONFIG, eos_token_id=(free[2],))
    stopped = generate(model, [[3, 1, 4]], 8)[0]
    assert stopped == free[: free.index(free[2]) + 1]
    assert generate(model, [[3, 1, 4]], 8, stop_ids=())[0] == free


def test_agree_hears_the_drawn_ids_of_every_step(model):
    heard = []

    def agree(ids):
        heard.append(ids.clone())
        return ids, ids.tolist()

    steps = list(stream(model, PROMPTS, 6, stop_ids=(), agree=agree))
    assert steps == list(stream(model, PROMPTS, 6, stop_ids=()))
    assert [ids.tolist() for ids in heard] == steps
    assert {(ids.shape, ids.dtype) for ids in heard} == {((len(PROMPTS),), torch.int64)}


def test_what_agree_says_is_fed_back_and_stops(model):
    """As with several processes that run one model together, where the word of one goes."""
    generator = torch.Generator().manual_seed(1)
    (said,) = generate(model, [[3, 1, 4]], 8, temperature=1.0, generator=generator)
    heard = []

    def agree(ids):
        heard.append(ids.item())
        token = said[len(heard) - 1]
        return torch.tensor([token]), [token]

    assert generate(model, [[3, 1, 4]], 8, agree=agree) == [said]
    with torch.no_grad():
        likeliest = model(torch.tensor([[3, 1, 4, *said[:-1]]]))[0, 2:].argmax(-1).tolist()
    assert heard == likeliest != said
    heard.clear()
    end = said.index(said[3]) + 1
    assert generate(model, [[3, 1, 4]], 8, stop_ids=[said[3]], agree=agree) == [said[:end]]


def test_padded_rows_of_the_vocabulary_are_never_drawn(model):
    for temperature in (0.0, 5.0):
        ids = generate(model, PROMPTS, 40, temperature=temperature, vocab_size=10)
        assert all(token < 10 for row in ids for token in row)


def test_the_cache_is_as_large_as_prompt_and_new_tokens(model, monkeypatch):
    made = []
    real = KVCache

    def spy(*arguments):
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr("llama_mini.generation.KVCache", spy)
    generate(model, [[1, 2, 3]], 5)
    assert [cache.capacity for cache in made] == [8]  # not max_position_embeddings


def test_each_token_costs_one_position_and_a_prefill_one_row_of_logits(model):
    shapes = []
    hooks = [
        model.embed.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[1])),
        model.lm_head.register_forward_hook(
            lambda _, inputs, output: shapes.append(output.shape[1])
        ),
    ]
    generate(model, [[1, 2, 3, 4]], 3)
    for hook in hooks:
        hook.remove()
    assert shapes == [4, 1, 1, 1, 1, 1]


def test_prompts_that_do_not_fit_are_refused_before_any_work(model):
    with pytest.raises(ValueError, match=r"prompt of 250 tokens and 7 new ones .* context of 256"):
        stream(model, [[1] * 250], 7)
    assert len(generate(model, [[1] * 250], 6)[0]) == 6
    with pytest.raises(ValueError, match=r"token id 61 .* vocabulary of 61"):
        stream(model, [[1, 61]])
    with pytest.raises(ValueError, match="token id -1"):
        stream(model, [[-1]])
    with pytest.raises(ValueError, match="no tokens"):
        stream(model, [[1], []])
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        stream(model, [[1]], -1)


def test_a_sliding_window_bounds_prompt_and_new_tokens():
    model = make(dataclasses.replace(CONFIG, sliding_window=10))
    assert len(generate(model, [[1, 2, 3]], 7)[0]) == 7
    with pytest.raises(ValueError, match=r"11 positions .* sliding_window of 10"):
        stream(model, [[1, 2, 3]], 8)


def test_nothing_asked_for_is_nothing_done(model):
    assert generate(model, [], 5) == []
    assert generate(model, [[1]], 0) == [[]]


def test_gradients_stay_on_for_the_caller(model):
    steps = stream(model, [[1]], 3)
    next(steps)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_without_a_number_of_tokens_the_context_is_the_end(model):
    for prompt in ([3, 1, 4], [1] * 255):
        (text,) = generate(model, [prompt], None, stop_ids=())
        assert len(prompt) + len(text) == CONFIG.max_position_embeddings
    with pytest.raises(ValueError, match=r"prompt of 256 tokens and 1 new .* context of 256"):
        stream(model, [[1] * 256], None)
    narrow = make(dataclasses.replace(CONFIG, sliding_window=10))
    assert len(generate(narrow, [[1, 2, 3]], None, stop_ids=())[0]) == 7


def test_a_cache_that_grows_changes_nothing(monkeypatch):
    config = dataclasses.replace(CONFIG, max_position_embeddings=40)
    model = make(config)
    whole = generate(model, PROMPTS, 30, stop_ids=())
    capacities = []
    monkeypatch.setattr("llama_mini.generation.STRIDE", 3)
    real = KVCache.grow

    def spy(cache, capacity):
        for tensor in cache.keys + cache.values:
            tensor[:, :, cache.length :] = math.nan
        real(cache, capacity)
        for tensor in cache.keys + cache.values:
            tensor[:, :, cache.length :] = math.nan  # what is not written yet is never read
        capacities.append(capacity)

    monkeypatch.setattr(KVCache, "grow", spy)
    outputs = generate(model, PROMPTS, None, stop_ids=())
    assert [output[:30] for output in outputs] == whole
    assert capacities == [24, 40]  # at 12 and 25 of 11 and 24 positions; never beyond the context
    assert {len(output) for output in outputs} == {32}


def test_what_a_cache_holds_is_not_computed_again(model):
    text = [3, 1, 4, *generate(model, [[3, 1, 4]], 20)[0]]
    cache = KVCache.for_model(model, capacity=4)
    widths = []
    hook = model.embed.register_forward_hook(lambda _, inputs, out: widths.append(out.shape[1]))
    try:
        first = generate(model, [text[:3]], 5, cache=cache)[0]
        assert (widths, cache.length) == ([3, 1, 1, 1, 1], 7)  # the last token was drawn, not read
        widths.clear()
        assert generate(model, [text[:10]], 3, cache=cache)[0] == text[10:13]
        assert widths == [3, 1, 1]
        widths.clear()
        cache.length = 2  # another branch from there
        branch = generate(model, [[3, 1, 7]], 3, cache=cache)[0]
        assert widths == [1, 1, 1]
    finally:
        hook.remove()
    assert first == text[3:8]
    assert branch == generate(model, [[3, 1, 7]], 3)[0]
    for prompts in ([[3, 1]], [[3, 1, 7, *branch[:2]]], [[3, 1, 7, 4, 4, 4, 4], [1]]):
        with pytest.raises(ValueError, match=r"holds 5 positions"):
            stream(model, prompts, 1, cache=cache)
    # It can still be written to by a plain call.
    cache.grow(40)
    with torch.no_grad():
        model(torch.tensor([[5]]), cache=cache)
    assert cache.length == 6


def test_text_in_the_place_of_ids_names_the_tokenizer(model):
    for prompts in (["Once upon a time"], "Once", [["Once"]]):
        with pytest.raises(ValueError, match=r"tokenizer\.encode"):
            generate(model, prompts)


def test_top_p_that_is_reached_exactly_keeps_no_more():
    # Halves and quarters are exact in float32: 0.5 is reached by one, 0.75 by two.
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert torch.tensor(logits).softmax(-1).tolist() == [0.5, 0.25, 0.125, 0.125]
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.875, 3)):
        assert (counts(logits, temperature=1.0, top_p=top_p) > 0).sum() == kept, top_p


def test_a_row_that_is_broken_is_the_only_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, math.nan, 0.0], [-1e30, -2e30, -3e30]])
    for temperature in (0.0, 1e-30, 1e-3):
        assert draw(logits, temperature, None, None, None).tolist() == [1, -1, 0]


def test_of_equal_ids_top_p_keeps_the_first():
    kept = counts([0.0] * 100, temperature=1.0, top_p=0.499) > 0
    assert kept.nonzero().flatten().tolist() == list(range(50))


def test_padding_has_positions_that_exist_and_sees_itself(model):
    """Learned positions have none below 0, and a softmax over nothing is NaN on some devices."""
    seen = []

    def look(_, arguments, options):
        seen.append((options["positions"], options["mask"]))

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    generate(model, PROMPTS, 3, stop_ids=())
    hook.remove()
    assert len(seen) == 3
    for positions, mask in seen:
        assert positions.min() >= 0
        assert mask.any(-1).all()


def test_a_vocabulary_without_ids_is_refused(model):
    with pytest.raises(ValueError, match="vocab_size is 0"):
        stream(model, [[1]], vocab_size=0)
