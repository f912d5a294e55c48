"""Recipes: defaults, overrides, and messages that name the key, the place and the remedy."""

import inspect
from typing import get_args

import pytest
import yaml

from linearize import finetuning, transfer
from linearize import recipe as recipe_module
from linearize.conversion import convert
from linearize.data import generate_data, load_data
from linearize.evaluation.ablation import ablation
from linearize.evaluation.probes import TASKS
from linearize.evaluation.recall import recall
from linearize.finetuning import finetune
from linearize.loading import DTYPES, EMBEDDED
from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES, WINDOW_KINDS
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.recipe import Recipe, describe, json_schema, load_recipe
from linearize.transfer import transfer_attention

SELF_DATA = "data:\n  max_tokens: 5000\n"


def yaml_id(item):
    """A YAML text on one line; nothing for the message that goes with it."""
    return " ".join(item.split()) if item.endswith("\n") else ""


@pytest.fixture
def write(tmp_path):
    def write_recipe(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def failure(path, overrides=()):
    with pytest.raises(ValueError, match=r"[:=]") as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_are_filled_in_and_output_is_named_after_the_file(write):
    recipe = load_recipe(write(SELF_DATA, "tiny.yaml"))
    assert recipe.model.path == "tiny-english"
    assert (recipe.convert.window, recipe.convert.sinks, recipe.convert.feature_map) == (
        64,
        4,
        "hedgehog",
    )
    assert recipe.finetune is None
    assert recipe.output == "runs/tiny"


def test_dump_round_trips(write):
    text = (
        SELF_DATA
        + "convert: {layers: [0, 2]}\nfinetune: {learning_rate: 1e-5}\ngenerate: {prompts: one}\n"
    )
    recipe = load_recipe(write(text))
    again = load_recipe(write(recipe.dump(), "again.yaml"))
    assert again == recipe
    assert recipe.differences(again) == [] and list(again.doubts()) == []
    assert yaml.safe_load(recipe.dump())["convert"]["layers"] == [0, 2]


def test_recipe_is_frozen(write):
    recipe = load_recipe(write(SELF_DATA))
    with pytest.raises(ValueError, match="frozen"):
        recipe.convert.window = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        (".5", 0.5),
        ("2", 2.0),
        ("1.5e-4", 1.5e-4),
        ("+3.0", 3.0),
        ("5.", 5.0),
    ],
    ids=lambda item: str(item),
)
def test_numbers_of_yaml_1_2_are_numbers(write, text, value):
    recipe = load_recipe(write(SELF_DATA + f"transfer:\n  learning_rate: {text}\n"), [])
    assert recipe.transfer.learning_rate == value
    override = load_recipe(write(SELF_DATA), [f"transfer.learning_rate={text}"])
    assert override.transfer.learning_rate == value


@pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000"])
def test_token_counts_may_be_written_short(write, text):
    assert load_recipe(write(f"data:\n  max_tokens: {text}\n")).data.max_tokens == 1_000_000


@pytest.mark.parametrize("word", ["no", "on", "yes", "1:30", "2020-01-01"])
def test_words_stay_words(write, word):
    recipe = load_recipe(write(SELF_DATA + f"model:\n  path: {word}\n"))
    assert recipe.model.path == word


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("convert.window=32", lambda r: r.convert.window, 32),
        ("convert.layers=every:2", lambda r: r.convert.layers, "every:2"),
        ("convert.layers=[0, 3]", lambda r: r.convert.layers, (0, 3)),
        ("transfer=null", lambda r: r.transfer, None),
        ("finetune.rank=2", lambda r: r.finetune.rank, 2),
        ("finetune={}", lambda r: r.finetune.rank, 8),
        ("data.sources=[a.txt, b=c.txt]", lambda r: r.data.sources, ("a.txt", "b=c.txt")),
        ("output=somewhere", lambda r: r.output, "somewhere"),
        ("convert.feature_dim=null", lambda r: r.convert.feature_dim, None),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_overrides(write, override, read, value):
    assert read(load_recipe(write(SELF_DATA + "finetune: null\n"), [override])) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "convert:\n  windw: 3\n",
            "mine.yaml:2: convert.windw: unknown key; did you mean convert.window?",
        ),
        ("covert:\n  window: 3\n", "mine.yaml:1: covert: unknown key; did you mean convert?"),
        ("window: 3\n", "mine.yaml:1: window: unknown key; did you mean convert.window?"),
        (
            "convert:\n  zzz: 3\n",
            "convert.zzz: unknown key; allowed in convert: layers, softmax_heads, window",
        ),
        ("zzzzzz: 3\n", "zzzzzz: unknown key; allowed in a recipe: model, convert, data"),
        (
            "convert:\n  mixing: calibratd\n",
            "mine.yaml:2: convert.mixing: 'calibratd' is not allowed; choose 'calibrated'",
        ),
        (
            "convert:\n  mixing: calibratid\n",
            "'lolcats' or 'kernel' (did you mean calibrated?)",
        ),
        (
            "convert:\n  window: 0\n",
            "mine.yaml:2: convert.window: 0: input should be greater than or equal to 1",
        ),
        ("convert:\n  window: true\n", "convert.window: True is a switch, a number is needed"),
        ("convert:\n  window: lots\n", "convert.window: 'lots': input should be a valid integer"),
        ("convert:\n  layers: every:0\n", "convert.layers: 'every:0' use 'all', 'every:2'"),
        ("convert:\n  layers: [0, -1]\n", "convert.layers: [0, -1] use 'all'"),
        ("convert:\n  layers: []\n", "convert.layers: [] use 'all'"),
        ("convert: 3\n", "mine.yaml:1: convert: 3 is not a section; write its keys below it"),
        ("generate: {max_new_tokens: 3}\n", "generate.prompts: is missing; add it"),
        (
            "model: {dtype: int8}\n",
            "model.dtype: 'int8' is not allowed; choose 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        ("transfer: {learning_rate: .nan}\n", "transfer.learning_rate: nan"),
    ],
    ids=yaml_id,
)
def test_wrong_values_are_named_with_place_and_remedy(write, text, message):
    assert message in failure(write(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data: {length: 68, max_tokens: 9}\n",
            "mine.yaml:1: data.length: 68 tokens fit into convert.window + convert.sinks = 68",
        ),
        (
            "data: {sources: [self, a.txt]}\n",
            "data.sources: 'self' cannot be mixed with other sources",
        ),
        ("seed: 1\n", "data.max_tokens: 'self' needs to know how many tokens the teacher writes"),
        (
            SELF_DATA + "transfer: {max_tokens: 1, max_steps: 2}\n",
            "mine.yaml:3: transfer.max_steps: set max_tokens or max_steps, not both",
        ),
        (
            SELF_DATA + "finetune: {loss: mix}\n",
            "finetune.loss: 'mix' needs kl_weight and ce_weight above 0",
        ),
        (
            SELF_DATA + "finetune: {max_tokens: 1, max_steps: 2}\n",
            "finetune.max_steps: set max_tokens or max_steps",
        ),
    ],
    ids=yaml_id,
)
def test_combinations_are_checked_on_load(write, text, message):
    assert message in failure(write(text))


def test_every_fault_is_listed_at_once(write):
    text = failure(write("convert: {windw: 3}\nmodel: {pth: x}\n"))
    assert "convert.windw" in text and "model.pth" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("convert: [1\n", "mine.yaml:2: not valid YAML"),
        ("- a\n- b\n", "mine.yaml: a recipe is a mapping of sections"),
        (
            "seed: 1\nseed: 2\n",
            "mine.yaml:2: seed: written twice, first at .*mine.yaml:1; keep one",
        ),
        ("convert:\n  window: 1\n  window: 2\n", "convert.window: written twice"),
    ],
    ids=["broken", "list", "twice", "twice-inside"],
)
def test_files_that_are_no_recipe(write, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write(text))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist"):
        load_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("override", ["convert.window", "=3", ""])
def test_an_override_without_key_and_value_is_refused(write, override):
    assert "is not an override; write key=value" in failure(write(SELF_DATA), [override])


def test_a_wrong_override_is_named_as_the_place(write):
    assert failure(write(SELF_DATA), ["convert.windw=3"]).startswith(
        "argument convert.windw=3: convert.windw: unknown key; did you mean convert.window?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("convert: {mixing: kernel}\n", "convert.mixing: 'kernel' reads feature products"),
        ("evaluate: {length: 68}\n", "evaluate.length: 68 tokens fit into"),
        (
            "transfer: {attention_weight: 0.7}\n",
            "transfer.attention_weight: has no effect with loss 'output'",
        ),
        (
            "finetune: {loss: ce, kl_weight: 0.5}\n",
            "finetune.kl_weight: has no effect with loss 'ce'; use loss 'mix'",
        ),
        ("finetune: {ce_weight: 0.5}\n", "finetune.ce_weight: has no effect with loss 'kl'"),
        (
            "finetune: {loss: ce, top_k: 9}\n",
            "finetune.top_k: has no effect with loss 'ce'; use loss 'kl'",
        ),
    ],
    ids=yaml_id,
)
def test_settings_of_no_use_warn(write, text, message):
    with pytest.warns(UserWarning, match=message.replace("+", r"\+")):
        load_recipe(write(SELF_DATA + text))


def test_differences_name_the_key_and_both_values(write):
    here = load_recipe(write(SELF_DATA), ["output=a"])
    there = load_recipe(write(SELF_DATA), ["convert.window=32", "output=b"])
    assert here.differences(there) == ["convert.window: 32 there, 64 here"]


def test_schema_lists_every_section_and_refuses_unknown_keys():
    schema = json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["ConvertSection"]["properties"]["mixing"]["enum"] == [
        "calibrated",
        "lolcats",
        "kernel",
    ]


def test_a_source_may_name_column_and_weight(write):
    text = "data:\n  sources:\n  - {path: a.jsonl, weight: 2}\n  - {path: b.txt, weight: 1}\n"
    recipe = load_recipe(write(text))
    assert [source.weight for source in recipe.data.sources] == [2, 1]
    assert load_recipe(write(recipe.dump(), "again.yaml")).differences(recipe) == []


def test_a_wrong_key_of_a_source_is_named(write):
    message = failure(write("data:\n  sources:\n  - {path: a.jsonl, colum: x}\n"))
    assert "data.sources" in message and "colum" in message


def test_describe_lists_keys_with_default_and_meaning():
    rows = {key: (default, meaning) for key, default, meaning in describe()}
    assert rows["convert.window"] == ("64", "Keys that each query reads exactly, its own included.")
    assert rows["data.sources"][0] == "[self]"
    assert rows["transfer.max_steps"][0] == "null"
    assert rows["convert"] == ("", "Which attention layers become linear, and into what.")


def test_every_setting_is_described():
    sections = [json_schema(), *json_schema()["$defs"].values()]
    silent = [
        f"{section['title']}.{key}"
        for section in sections
        for key, value in section["properties"].items()
        if "description" not in value and "$ref" not in value
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("section", "function"),
    [
        ("ConvertSection", convert),
        ("TransferSection", transfer_attention),
        ("FinetuneSection", finetune),
        ("EvaluateSection", ablation),
        ("RecallSection", recall),
        ("DataSection", load_data),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_defaults_are_those_of_the_library(section, function):
    parameters = inspect.signature(function).parameters
    fields = getattr(recipe_module, section).model_fields
    shared = {
        name: (field.default, parameters[name].default)
        for name, field in fields.items()
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
    assert len(shared) >= 3
    assert {name: mine for name, (mine, _) in shared.items()} == {
        name: theirs for name, (_, theirs) in shared.items()
    }


def test_defaults_of_self_are_those_of_the_library():
    parameters = inspect.signature(generate_data).parameters
    fields = recipe_module.DataSection.model_fields
    for name in ("temperature", "batch_size"):
        assert fields[name].default == parameters[name].default


@pytest.mark.parametrize(
    ("section", "key", "names"),
    [
        ("ConvertSection", "feature_map", FEATURE_MAPS),
        ("ConvertSection", "mixing", MIXING_RULES),
        ("ConvertSection", "k_map", K_MAPS),
        ("ConvertSection", "window_kind", WINDOW_KINDS),
        ("TransferSection", "loss", transfer.LOSSES),
        ("TransferSection", "position_weights", transfer.POSITION_WEIGHTS),
        ("TransferSection", "mixing_start", transfer.MIXING_STARTS),
        ("FinetuneSection", "loss", finetuning.LOSSES),
        ("FinetuneSection", "method", finetuning.METHODS),
        ("ModelSection", "dtype", DTYPES),
        ("RecallSection", "tasks", TASKS),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_allowed_names_are_those_of_the_library(section, key, names):
    field = getattr(recipe_module, section).model_fields[key]
    allowed = get_args(field.annotation)
    assert set(get_args(allowed[0]) if key == "tasks" else allowed) == set(names)


def test_the_default_model_is_the_embedded_one():
    assert Recipe.model_fields["model"].default.path in EMBEDDED


def test_softmax_heads_are_a_mapping_of_layers_to_heads(write):
    recipe = load_recipe(write("convert: {softmax_heads: {17: [0, 2]}}\n" + SELF_DATA))
    assert recipe.convert.softmax_heads == {17: (0, 2)}
    again = load_recipe(write(recipe.dump()))
    assert not again.differences(recipe)
    for wrong in ("{17: []}", "{-1: [0]}", "{17: [-2]}", "[17]"):
        with pytest.raises(ValueError, match=r"convert.softmax_heads"):
            load_recipe(write(f"convert: {{softmax_heads: {wrong}}}\n" + SELF_DATA))
