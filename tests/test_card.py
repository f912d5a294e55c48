"""The model card: valid metadata, the run's own figures, and nothing that was not measured."""

import dataclasses

import pytest
import torch
from huggingface_hub import ModelCard

from linearize import tables
from linearize.card import MAPS, PAPERS, Facts, check_card, make_card
from linearize.licences import inherited
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.recipe import HELD_OUT, SELF, Recipe

SHAPE = {"num_heads": 4, "num_key_value_heads": 2, "qk_dim": 8, "v_dim": 8, "scaling": 8**-0.5}
SECTION = LinearizeConfig(
    base_model_type="llama", layers=[0, 1], geometry={"0": SHAPE, "1": SHAPE}, window=4, sinks=2
)


def row(perplexity, **more):
    scores = {"perplexity": perplexity, "kl_to_teacher": 0.1768, "top1_agreement": 0.8222}
    errors = {f"{key}_se": 0.25 for key in scores}
    buckets = [{"from": 0, "to": 4, **scores}, {"from": 4, "to": 32, **scores}]
    window = {"num_tokens": 1234, "length": 32, "stride": 32, "bos": "none", "buckets": buckets}
    return scores | errors | window | more


def facts(**more):
    """A finished run of both stages."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": "me/base"},
            "data": {"sources": ["a.jsonl", "Salesforce/wikitext:raw"], "length": 32},
            "convert": {"window": 4, "sinks": 2},
            "evaluate": {"text": "test.txt"},
            "finetune": {"max_steps": 3},
        }
    )
    cost = {"tokens": 1000, "steps": 3, "seconds": 2.0}
    branch = {"gain": 0.3, "gain_se": 0.01}
    results = {
        "ablation": {
            "teacher": row(20.0),
            "converted": row(23.0, linear_branch=branch),
            "window_only": row("inf", perplexity_se=None),
            "swa_sinks": row(31.0),
        },
        "gap_closed": {"ablation": 0.565},
        "data": {"train": {"sources": [{"name": "a.jsonl"}, {"name": "Salesforce/wikitext:raw"}]}},
        "samples": [{"prompt": "One", "teacher": "One\n\ntwo", "converted": "One three"}],
        "transfer": cost,
        "finetune": cost,
        "versions": {"linearize": "0.1.0", "torch": "2.13.0", "peft": None},
        "commit": "0123abc",
        "hardware": "one processor",
        "seconds": 99.5,
    }
    given = {
        "name": "my-model",
        "repo_id": "me/my-model",
        "section": SECTION,
        "num_layers": 2,
        "dtype": torch.bfloat16,
        "licence": inherited({"license": "apache-2.0"}),
        "base_name": "me/base",
        "base_id": "me/base",
        "languages": ["en"],
        "datasets": ["Salesforce/wikitext"],
        "recipe": recipe.model_dump(mode="json"),
        "results": results,
    }
    return Facts(**given | more)


def bare(**more):
    """A model of which nothing else is known."""
    return Facts("x", SECTION, 3, torch.float32, inherited({}), **more)


def test_metadata_come_back_as_they_were_meant():
    data = ModelCard(str(make_card(facts()))).data
    assert (data.base_model, data.base_model_relation) == ("me/base", "finetune")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.language) == ("apache-2.0", ["en"])
    assert data.datasets == ["Salesforce/wikitext"]
    assert {"linearize", "linear-attention", "hedgehog"} <= set(data.tags)
    assert data.model_name == "my-model"
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"perplexity": 23.0, "kl_to_teacher": 0.1768, "top1_agreement": 0.8222}
    assert {result.dataset_name for result in data.eval_results} == {"test.txt"}
    assert data.eval_results[0].dataset_args == {"length": 32, "stride": 32, "bos": "none"}


def test_what_is_not_known_is_not_in_the_metadata():
    data = ModelCard(str(make_card(bare()))).data.to_dict()
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}


@pytest.mark.parametrize("value", ["inf", float("nan"), None])
def test_what_is_no_number_is_no_result(value):
    results = {"ablation": {"converted": row(23.0) | {"perplexity": value}}}
    data = ModelCard(str(make_card(bare(results=results)))).data
    assert [r.metric_type for r in data.eval_results] == ["kl_to_teacher", "top1_agreement"]


def test_an_adapter_says_so():
    card = make_card(facts(adapter=True))
    assert card.data.base_model_relation == "adapter"
    assert "import linearize\n" in card.text and "trust_remote_code" not in card.text
    assert "checked by a hash" in card.text


def test_the_certificate_shows_every_row_and_the_verdict():
    text, found = make_card(facts()).text, facts()
    rows = found.results["ablation"]
    assert f"**{tables.verdict(rows)}**" in text
    assert "| converted | 23.00 ± 0.25 | 0.1768 ± 0.2500 | 82.2 % |" in text
    assert "| window only | inf ± - |" in text
    assert "closes 56 % of the gap" in text or "closes 57 % of the gap" in text
    assert "1,234 tokens of test.txt in windows of 32, stride 32" in text
    assert "| 4 to 32 | 20.00 | 23.00 | inf |" in text


def test_the_floor_of_a_finetuned_run_is_named():
    found = facts()
    rows = found.results["ablation"] | {"swa_sinks_finetuned": row(28.0)}
    text = make_card(facts(results=found.results | {"ablation": rows})).text
    assert "between “window + sinks, finetuned” and the base model" in text


def test_what_was_converted_trained_and_used_is_listed():
    text = make_card(facts()).text
    for part in (
        "| linear layers | all (2 of 2) |",
        "| window, sinks | 4, 2 |",
        "new parameters, layer by layer | 1,000 tokens, 3 steps |",
        "| finetuning, lora, kl | 1,000 tokens, 3 steps |",
        "| training text | a.jsonl, Salesforce/wikitext:raw |",
        "linearize run recipe.yaml",
        "linearize 0.1.0, torch 2.13.0, commit `0123abc`, seed 0.",
        "It took 100 s on one processor.",
        "> One\n>\n> two",
        "trained on rows of 32 tokens",
        "licence: apache-2.0",
    ):
        assert part in text, part
    assert "peft" not in text


def test_text_by_the_base_model_and_held_out_rows_are_said_in_words():
    found = facts()
    data = {"sources": [SELF], "length": 32, "max_tokens": 1000}
    recipe = found.recipe | {"data": data, "evaluate": {"text": HELD_OUT}}
    results = found.results | {"data": {"train": {"sources": [{"name": SELF}]}}}
    text = make_card(facts(recipe=recipe, results=results)).text
    assert "| training text | written by the base model |" in text
    assert "tokens of rows held out of the training text in windows" in text


def test_a_section_without_figures_is_not_there():
    text = make_card(bare()).text
    for title in ("worth", "Speed", "sample", "make it again", "position"):
        assert title not in text
    assert "Nothing was measured for this page." in text
    assert "2 of 3 layers" in text and "These layers remember" in text
    assert "| linear layers | 0-1 (2 of 3) |" in text
    assert "was not known here" in text


def test_state_and_cache_are_computed_from_the_shapes():
    text = make_card(facts()).text
    # per layer 2 heads x (8 + 8) numbers of 2 bytes, and two layers
    assert "grows by 128 B per token" in text
    assert "| 1,024 | 128 KiB |" in text


def test_speed_is_shown_where_it_was_measured():
    decode = [{"context": 4096, "converted_s": 0.1, "teacher_s": 0.2}]
    results = {"efficiency": {"decode": decode, "dtype": "bfloat16"}, "hardware": "a chip"}
    text = make_card(bare(results=results)).text
    assert "| 4,096 | 100.0 | 200.0 |" in text and "bfloat16, a chip" in text


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_papers_of_every_map_are_cited(name):
    text = make_card(bare() if name == "hedgehog" else _with_map(name)).text
    assert "arXiv:2410.10254" in text
    assert name not in MAPS or f"arXiv:{MAPS[name]}" in text
    assert set(MAPS.values()) <= set(PAPERS.values())


def _with_map(name):
    return dataclasses.replace(bare(), section=dataclasses.replace(SECTION, feature_map=name))


def test_conditions_of_a_licence_stand_in_the_card():
    text = make_card(facts(licence=inherited({"license": "llama3.2"}))).text
    assert "Built with Llama" in text


def test_a_good_card_passes_the_check():
    check_card(str(make_card(facts())))
    check_card(str(make_card(bare())))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("- en\n", "- english please\n", "--language: 'english please' is no language code"),
        ("license: apache-2.0", "license: My Licence", "--license: 'My Licence' is no identifier"),
        ("value: 23.0", "value: .nan", "README.md: perplexity is nan, no number"),
        ("language:", "language: [", "README.md: its metadata cannot be read"),
        ("library_name: transformers\n", "", "README.md: it has no metadata"),
        ("model-index:", "model-index: 3\nx:", "README.md: its metadata cannot be read"),
    ],
    ids=["language", "licence", "nan", "yaml", "empty", "model-index"],
)
def test_a_card_that_the_hub_would_refuse_is_refused(before, after, message):
    text = str(make_card(facts()))
    assert before in text
    with pytest.raises(ValueError, match=message):
        check_card(text.replace(before, after, 1))
