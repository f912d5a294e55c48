"""The ablation table: what each row means, and what the rows owe to each other."""

import pytest
import torch
from conftest import random_ids, randomize, tiny_linearized, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize
from linearize.evaluation.ablation import ablation
from linearize.evaluation.perplexity import check_comparable, perplexity
from linearize.evaluation.rows import ROWS, Row, equal_bytes_windows
from linearize.inspection import state_bytes
from linearize.modeling.configuration_linearized import LinearizeConfig

WINDOW, LENGTH = 4, 32
IDS = random_ids(1, 130)[0]


def table(model, ids=IDS, **options):
    return ablation(model, None, ids, **{"length": LENGTH, "batch_size": 3, **options})


def hidden_keys(window, sinks, length=LENGTH):
    """[T, T] bool, True where a query must not see a key: neither window nor sink nor past."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    return (j > i) | ((j <= i - window) & (j >= sinks))


def masked_nll(model, window, sinks):
    """Loss per token of a softmax model that sees the last W and first N keys only."""
    mask = ~hidden_keys(window, sinks)[None, None]
    total = 0.0
    for begin in range(0, len(IDS) - 1, LENGTH):
        ids = IDS[begin : begin + LENGTH + 1]
        n = len(ids) - 1
        with torch.no_grad():
            logits = model(ids[None, :-1], attention_mask=mask[..., :n, :n]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
    return total / (len(IDS) - 1)


def finetuned(model):
    """The model with other base weights, as after stage 2."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "mlp" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_rows_agree_with_perplexity_in_each_mode():
    model = tiny_linearized(sinks=1)
    results = table(model)
    assert tuple(results) == ROWS
    modes = {
        "teacher": linearize.teacher(model),
        "window_only": linearize.branches(model, linear=False),
        "linear_only": linearize.branches(model, window=False),
    }
    alone = {"converted": perplexity(model, None, IDS, length=LENGTH)}
    for name, mode in modes.items():
        with mode:
            alone[name] = perplexity(model, None, IDS, length=LENGTH)
    for name, result in alone.items():
        for key in ("perplexity", "perplexity_se", "nll", "num_tokens"):
            assert results[name][key] == pytest.approx(result[key], rel=1e-5)
    check_comparable(results)
    check_comparable({"table": results["converted"], "alone": alone["converted"]})
    assert len({round(result["nll"], 3) for result in alone.values()}) == 4


def test_kl_and_agreement_equal_brute_force():
    model = tiny_linearized(sinks=1)
    kl, agreement = [], []
    for begin in range(0, len(IDS) - 1, LENGTH):
        ids = IDS[begin : begin + LENGTH][: len(IDS) - 1 - begin][None]
        with torch.no_grad():
            student = model(ids).logits[0].double().log_softmax(-1)
            with linearize.teacher(model):
                teacher = model(ids).logits[0].double().log_softmax(-1)
        kl += (teacher.exp() * (teacher - student)).sum(-1).tolist()
        agreement += (teacher.argmax(-1) == student.argmax(-1)).tolist()
    result = table(model, rows=["converted"])["converted"]
    assert result["num_tokens"] == len(kl) == 129
    assert result["kl_to_teacher"] == pytest.approx(sum(kl) / 129, abs=1e-5)
    assert result["top1_agreement"] == pytest.approx(sum(agreement) / 129)
    assert result["kl_to_teacher"] > 0.01
    assert 0 < result["top1_agreement"] < 1


def test_teacher_and_control_are_the_base_model():
    stock = perplexity(tiny_llama(), None, IDS, length=LENGTH)
    results = table(tiny_linearized(sinks=1))
    assert results["teacher"]["nll"] == pytest.approx(stock["nll"], abs=1e-6)
    assert results["teacher"]["kl_to_teacher"] == 0
    assert results["teacher"]["top1_agreement"] == 1
    assert results["control"]["nll"] == pytest.approx(stock["nll"], abs=1e-5)
    assert abs(results["control"]["kl_to_teacher"]) < 1e-6
    assert results["control"]["max_logit_difference"] < 1e-4


def test_window_over_everything_has_nothing_to_lose():
    results = table(tiny_linearized(window=LENGTH), rows=["converted", "window_only"])
    for result in results.values():
        assert abs(result["kl_to_teacher"]) < 1e-6
        assert result["top1_agreement"] == 1
        assert [(b["from"], b["to"]) for b in result["buckets"]] == [(0, LENGTH)]


@pytest.mark.parametrize(("sinks", "floor"), [(0, 4), (2, 2)])
def test_floor_is_the_base_model_behind_a_mask(sinks, floor):
    expected = masked_nll(tiny_llama(), WINDOW, floor)
    results = table(tiny_linearized(sinks=sinks), rows=["swa_sinks", "window_only"])
    assert results["swa_sinks"]["nll"] == pytest.approx(expected, abs=1e-5)
    assert (results["swa_sinks"] == results["window_only"]) == (sinks == floor)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_equal_bytes_windows_fill_the_bytes_of_the_state(dtype, size):
    model = tiny_linearized(sinks=2, layers=[1]).to(dtype)
    section = LinearizeConfig.from_dict(model.config.linearize_config)
    windows = equal_bytes_windows(section, model.dtype)
    held = state_bytes(section, 1, dtype)
    token = 2 * (8 + 8) * size  # two key/value heads of size 8
    assert list(windows) == [1]
    assert held - token < (windows[1] + 2) * token <= held
    assert windows[1] > WINDOW


def test_equal_bytes_row_is_the_base_model_behind_a_wider_mask():
    model = tiny_linearized(sinks=2, feature_dim=2)
    result = table(model, rows=["swa_sinks_equal_bytes", "swa_sinks"])
    row = result["swa_sinks_equal_bytes"]
    assert WINDOW < row["windows"][0] < LENGTH / 2
    expected = masked_nll(tiny_llama(), row["windows"][0], 2)
    assert row["nll"] == pytest.approx(expected, abs=1e-5)
    assert abs(row["nll"] - result["swa_sinks"]["nll"]) > 1e-3


@pytest.mark.parametrize("is_converted", [False, True], ids=["softmax-base", "converted-base"])
def test_base_rows_come_from_the_base_model(is_converted):
    before = table(tiny_linearized(sinks=1))
    base = tiny_linearized(sinks=1) if is_converted else tiny_llama()
    classes = [type(module) for module in base.modules()]
    names = list(base.state_dict())
    after = table(finetuned(tiny_linearized(sinks=1)), base_model=base)
    for name in ("teacher", "swa_sinks", "control"):
        assert after[name]["nll"] == pytest.approx(before[name]["nll"], abs=1e-6)
    for name in ("converted", "window_only", "linear_only"):
        assert abs(after[name]["nll"] - before[name]["nll"]) > 1e-3
    assert after["control"]["max_logit_difference"] < 1e-4
    assert [type(module) for module in base.modules()] == classes
    assert list(base.state_dict()) == names


@pytest.mark.parametrize("kept", [dict(layers=[1]), dict(softmax_heads={0: [0, 1], 1: [1]})])
def test_layers_and_heads_left_alone_keep_their_attention_in_every_row(kept):
    model = tiny_linearized(sinks=1, **kept)
    results = table(model, base_model=tiny_llama())
    plain = table(tiny_linearized(sinks=1, **kept))
    for name in ROWS:
        assert results[name]["nll"] == pytest.approx(plain[name]["nll"], abs=1e-6)
    everywhere = table(tiny_linearized(sinks=1), rows=["swa_sinks"])
    assert abs(everywhere["swa_sinks"]["nll"] - plain["swa_sinks"]["nll"]) > 1e-3


def test_no_attention_is_a_model_without_its_output_projections():
    model, without = tiny_linearized(sinks=1), tiny_llama()
    with torch.no_grad():
        for layer in without.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    expected = perplexity(without, None, IDS, length=LENGTH)
    found = table(model, rows=["no_attention"])["no_attention"]
    assert found["nll"] == pytest.approx(expected["nll"], abs=1e-6)
    assert model.model.layers[0].self_attn.linearize_mode == "linear"


def test_the_gain_of_the_linear_branch_is_the_paired_difference():
    model = tiny_linearized(sinks=1)
    results = table(model, rows=["converted", "window_only"])
    branch = results["converted"]["linear_branch"]
    converted, without = results["converted"], results["window_only"]
    assert branch["gain"] == pytest.approx(without["nll"] - converted["nll"], abs=1e-9)
    for found, a, b in zip(branch["buckets"], converted["buckets"], without["buckets"]):
        assert (found["from"], found["to"]) == (a["from"], a["to"])
        assert found["gain"] == pytest.approx(b["nll"] - a["nll"], abs=1e-9)
    assert abs(branch["buckets"][0]["gain"]) < 1e-6, "nothing is hidden from the first W tokens"
    saved, counts = [], []
    for begin in range(0, len(IDS) - 1, LENGTH):
        ids = IDS[begin : begin + LENGTH + 1][None]
        losses = []
        with torch.no_grad():
            for linear in (False, True):
                with linearize.branches(model, linear=linear):
                    losses.append(model(ids[:, :-1], labels=None).logits[0].double())
        nll = [torch.nn.functional.cross_entropy(x, ids[0, 1:], reduction="sum") for x in losses]
        saved.append((nll[0] - nll[1]).item())
        counts.append(ids.shape[1] - 1)
    saved, counts = (torch.tensor(x, dtype=torch.float64) for x in (saved, counts))
    mean, K = saved.sum() / counts.sum(), len(saved)
    variance = K / (K - 1) * (saved - mean * counts).square().sum() / counts.sum() ** 2
    assert branch["gain_se"] == pytest.approx(variance.sqrt().item(), rel=1e-4)


def test_rows_of_your_own():
    model, other = tiny_linearized(sinks=1), finetuned(tiny_linearized(sinks=1))
    rows = ["converted", Row("teacher_finetuned", other, linearize.teacher), Row("other", other)]
    results = table(model, rows=rows)
    assert list(results) == ["converted", "teacher_finetuned", "other"]
    with linearize.teacher(other):
        expected = perplexity(other, None, IDS, length=LENGTH)
    assert results["teacher_finetuned"]["nll"] == pytest.approx(expected["nll"], abs=1e-6)
    assert results["teacher_finetuned"]["kl_to_teacher"] > 1e-3


def test_buckets_add_up_and_begin_with_what_the_window_holds():
    results = table(tiny_linearized())
    for result in results.values():
        buckets = result["buckets"]
        assert [(b["from"], b["to"]) for b in buckets] == [(0, 4), (4, 8), (8, 16), (16, 32)]
        total = sum(b["num_tokens"] for b in buckets)
        assert total == result["num_tokens"] == 129
        for key in ("nll", "kl_to_teacher", "top1_agreement"):
            mean = sum(b[key] * b["num_tokens"] for b in buckets) / total
            assert mean == pytest.approx(result[key], abs=1e-9)
    first = {name: result["buckets"][0] for name, result in results.items()}
    assert first["converted"]["nll"] == pytest.approx(first["window_only"]["nll"], abs=1e-6)
    assert abs(first["converted"]["kl_to_teacher"]) < 1e-6
    last = {name: result["buckets"][-1] for name, result in results.items()}
    assert abs(last["converted"]["nll"] - last["window_only"]["nll"]) > 1e-3


def test_buckets_hold_only_scored_positions():
    buckets = table(tiny_linearized(), rows=["converted"], stride=8)["converted"]["buckets"]
    counts = {(b["from"], b["to"]): b["num_tokens"] for b in buckets}
    assert counts[0, 4] == 4
    assert counts[16, 32] == 129 - 16


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"logits_chunk": 5}], ids=["batch", "chunk"]
)
def test_batches_and_slices_change_nothing(options):
    model = tiny_linearized(sinks=1)
    plain, other = table(model), table(model, **options)
    for name in ROWS:
        for key in ("nll", "nll_se", "kl_to_teacher", "kl_to_teacher_se", "top1_agreement"):
            assert other[name][key] == pytest.approx(plain[name][key], abs=1e-5)


def test_model_is_left_as_it_was():
    model = tiny_linearized(sinks=1).train()
    ids = IDS[None, :40]
    with torch.no_grad():
        before = model(ids).logits
        table(model)
        after = model(ids).logits
    assert model.training
    assert torch.equal(before, after)


def test_broken_code_path_is_called_out(monkeypatch):
    """A control that does not equal the teacher: here because window and past are one key short."""
    from linearize.evaluation import rows as module

    exact_keys = module.exact_keys

    def short(model, *, window=None, **options):
        return exact_keys(model, window=None if window is None else 5, linear=False)

    monkeypatch.setattr(module, "exact_keys", short)
    with pytest.warns(
        UserWarning, match=r"^ablation: the control row is .* nats away from the tea"
    ):
        table(tiny_linearized(), rows=["control"])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_llama, {}, r"^rows: this model has no linearized layer"),
        (
            tiny_linearized,
            {"rows": ["student"]},
            r"^rows: 'student' is not a row; use teacher,",
        ),
        (tiny_linearized, {"rows": [Row("teacher", None)]}, r"^rows: 'teacher' is a row already"),
        (tiny_linearized, {"stride": 99}, r"^evaluate\.stride: 99 must be at least 1"),
    ],
    ids=["softmax-model", "unknown-row", "taken-name", "stride"],
)
def test_impossible_tables_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        table(make(), **options)


def test_trained_model_loses_without_its_past(stories260k):
    """Text of a real model: the window alone is worse than the teacher, past the window only."""
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    model = randomize(linearize.convert(model, window=8, sinks=0), std=0.1)
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "park. One day, she saw a big dog. The dog was sad. Lily asked the dog why he was sad. "
        "The dog said he lost his ball. Lily helped the dog to find the ball. They were happy. "
    )
    rows = ["teacher", "window_only", "swa_sinks"]
    results = ablation(model, tokenizer, [story, story.replace("dog", "cat")], rows=rows, length=64)
    assert results["teacher"]["bos"] == "first"
    assert results["window_only"]["nll"] > results["swa_sinks"]["nll"] > results["teacher"]["nll"]
    first = [results[name]["buckets"][0]["nll"] for name in rows]
    assert first == pytest.approx([first[0]] * 3, abs=1e-5)
