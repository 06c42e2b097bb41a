"""Names of tensors in files, turned into ours: what is no name of a table stays unknown."""

import pytest

from llama_mini.checkpoint.names import HUGGING_FACE, inverse, translate, translate_all

TABLE = inverse(HUGGING_FACE)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.norm.weight", "final_norm.weight"),
        ("model.layers.12.mlp.up_proj.weight", "blocks.12.ffn.up_proj.weight"),
        ("model.layers.12.mlp.up_proj.bias", "blocks.12.ffn.up_proj.bias"),
        ("model.layers.N.mlp.up_proj.weight", None),  # a letter is no number of a block
        ("model.layers.12.mlp.up_proj.scale", None),
        ("model.layers.1.2.mlp.up_proj.weight", None),
    ],
)
def test_one_name(theirs, ours):
    assert translate(theirs, TABLE) == ours


def test_a_first_part_goes_only_where_all_names_carry_it():
    names = ["norm.weight", "embed_tokens.weight"]
    ours = ["final_norm.weight", "embed.weight"]
    for front in ("model.", "a.model.", "_orig_mod.a.b.model."):
        assert list(translate_all([front + name for name in names], TABLE).values()) == ours
    apart = [f"{part}.model.{name}" for part, name in zip("ab", names, strict=True)]
    assert list(translate_all(apart, TABLE).values()) == [None, None]
