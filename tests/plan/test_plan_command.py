"""`pdtrain plan` as its user meets it: sources, refusals, sweep, advice, the rehearsal, exact counting."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdtrain.cli import cli, main
from pdtrain.config import load_run
from pdtrain.config.load import parse_run
from pdtrain.config.rules import refusals
from pdtrain.plan import states
from pdtrain.plan.hardware import named, with_probe
from pdtrain.plan.parameters import count
from pdtrain.plan.setup import Options, Setup, bubble, in_flight, stages
from pdtrain.plan.sweep import sweep
from pdtrain.plan.timing import times

DEEPSEEK = {  # the shape of the published config.json
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
MEGATRON = """
TP=2
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights --vocab-size 32000 \\
  --num-experts 8 --moe-router-topk 2 --tensor-model-parallel-size ${TP} --expert-model-parallel-size 8 \\
  --pipeline-model-parallel-size 4 --use-distributed-optimizer --seq-length 4096 --micro-batch-size 1 \\
  --global-batch-size 256 --bf16
"""


def plan(capsys, *arguments: str) -> tuple[int, str]:
    status = cli.main(["plan", *arguments], standalone_mode=False)
    return status, capsys.readouterr().out


def plan_json(capsys, *arguments: str):
    status, out = plan(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_plain_plan_prints_its_conventions(capsys):
    status, out = plan(capsys, "--preset", "deepseek-v3", "--gpus", "2048", "--memory", "80GB")
    assert status == 0
    for text in ("671,026,419,200", "250.45 GFLOP causal", "conventions:", "embedding lookup excluded", "does NOT fit"):
        assert text in out


def test_hugging_face_config(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK))
    found = plan_json(capsys, str(path), "--gpus", "64", "--set", "modules.experts.expert=64")
    assert found["parameters"]["total"] == 671_026_419_200


def test_megatron_arguments(capsys, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON)
    found = plan_json(capsys, str(path), "--gpus", "64")
    assert found["layout"]["tensor"] == 2 and found["layout"]["pipeline"] == 4 and found["layout"]["expert"] == 8
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 of them active (one 0.13 billion of which is the embedding)
    assert round(found["parameters"]["total"] / 1e9, 1) == 46.7
    assert round(found["parameters"]["activated_with_embedding"] / 1e9, 1) == 12.9


@pytest.mark.parametrize("text, says", [
    ('{"hidden_size": 64}', "num_hidden_layers"),
    ('{"hidden_size": "wide", "num_hidden_layers": 2, "num_attention_heads": 2}', "no whole number"),
    ("{", "not valid JSON"),
    ("--num-layers 2 --hidden-size 'x", "unbalanced quotes"),
    ('{"hidden_size": NaN, "num_hidden_layers": 2, "num_attention_heads": 2}', "hidden_size = nan"),
    ('{"hidden_size": 64, "num_hidden_layers": 1e300, "num_attention_heads": 2}', "larger than any model"),
    ('{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512, "num_experts": 4, '
     '"moe_intermediate_size": 0, "shared_expert_intermediate_size": 8}', "expert_hidden = 0"),
    ("--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length inf", "seq_length = inf"),
    ("--num-layers 99999 --hidden-size 64 --num-attention-heads 2", "at most 10,000 blocks"),
])  # fmt: skip
def test_damaged_sources_are_one_line(tmp_path, capsys, text, says):
    path = tmp_path / "model"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(path), "--gpus", "8"])
    out, error = capsys.readouterr()
    error = "".join(line for line in error.splitlines(keepends=True) if not line.startswith("pdtrain: warning"))
    assert stop.value.code == 2 and out == ""
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments, says", [
    (["--probe", "/dev/zero"], "no regular file"), (["--hardware", "/dev/zero"], "no regular file"),
    (["--overload", "nan"], "no number to reckon with"), (["--overload", "inf"], "no number to reckon with"),
    (["sweep", "--gpus", "10000000000"], "at most 1,048,576 devices"), (["/dev/zero"], "no regular file"),
])  # fmt: skip
def test_what_has_no_end_is_refused(capsys, arguments, says):
    command = [arguments.pop(0)] if arguments[0] == "sweep" else []
    preset = [] if arguments[0] == "/dev/zero" else ["--preset", "deepseek-v3"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", *command, *arguments, *preset])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_plan_imports_no_torch():
    code = ("import sys; from pdtrain.cli import cli\n"
            "cli.main(['plan', '--preset', 'deepseek-v3', '--json'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_measured_links_replace_the_catalogue(capsys, tmp_path):
    probe = tmp_path / "probe.json"
    links = [{"src": 0, "dst": 1, "bytes_per_second": 300e9}, {"src": 0, "dst": 8, "bytes_per_second": 5e9}]
    probe.write_text(json.dumps({"links": links}))
    arguments = ("--preset", "deepseek-v3", "--gpus", "2048")
    slow, fast = plan_json(capsys, *arguments, "--probe", str(probe)), plan_json(capsys, *arguments)
    assert slow["hardware"]["measured"] == ["network_bandwidth", "node_bandwidth"]
    assert slow["exposed_communication_seconds"] > 5 * fast["exposed_communication_seconds"]


def test_a_measured_rate_is_taken_whole_and_the_smallest_all_reduce_starts_a_collective(tmp_path):
    probe = tmp_path / "probe.json"
    rows = [{"operation": "all_reduce", "bytes": 1024, "median_seconds": 3e-4},
            {"operation": "all_reduce", "bytes": 4096, "median_seconds": 2e-4},
            {"operation": "all_reduce", "bytes": 1 << 30, "median_seconds": 1e-6},
            {"operation": "all_gather", "bytes": 1024, "median_seconds": 1e-6}]  # fmt: skip
    probe.write_text(json.dumps({"links": [{"src": 0, "dst": 1, "bytes_per_second": 450e9}], "rows": rows}))
    plain = named("h100-sxm")
    found = with_probe(plain, probe)
    assert found.measured == ("latency", "node_bandwidth") and found.latency == 2e-4
    run = load_run(preset="tiny", world=8)
    before, after = (
        next(item.seconds - item.calls * device.latency for item in times(Setup(run), device)[1] if item.group == "TP")
        for device in (plain, found)
    )
    assert after == pytest.approx(0.75 * before)


def test_update_pool_and_exchange_are_in_the_plan(capsys):
    found = plan_json(capsys, "--preset", "deepseek-v3", "--gpus", "2048")["pools"]
    assert found["state_bytes_per_rank"] * found["ranks"] == pytest.approx(12 * 671_026_404_352)
    assert found["exchange_bytes_per_step"] == 4 * 671_026_404_352  # BF16 gradients there, BF16 weights back


def test_sweep_ranks_what_fits_and_explains_the_rest():
    run = load_run(preset="deepseek-v3", world=2048)
    found = sweep(run, Options(), named("h800"), 80e9)
    assert found.candidates
    steps = [item.step for item in found.candidates]
    assert steps == sorted(steps)
    assert all(item.worst < 0.9 * 80e9 for item in found.candidates)
    assert found.candidates[0].pareto
    assert sum(found.reasons.values()) == len(found.rejected) > 0
    assert all(reason for _, reason in found.rejected)
    assert {"expert divides experts", "layers fit"} <= set(found.reasons)


def test_sweep_of_too_small_a_cluster_says_why(capsys):
    status, out = plan(capsys, "sweep", "--preset", "deepseek-v3", "--gpus", "128", "--memory", "80GB")
    assert status == 0
    assert "0 fit" in out and "does not fit (states alone)" in out


def test_advice_makes_it_fit_first(capsys):
    found = plan_json(capsys, "advise", "--preset", "deepseek-v3", "--gpus", "2048", "--memory", "80GB")
    assert found["fits"] is False and found["changes"][0]["fits"] is True
    assert found["changes"][0]["change"] == "--recompute full"


def test_advice_says_do_not_separate_a_model_that_fits_on_one_device(capsys):
    found = plan_json(capsys, "advise", "--preset", "tiny", "--gpus", "8", "--memory", "80GB")
    assert "do not separate" in found["module_separation"] and "do not separate" in found["phase_separation"]


def test_shrink_prints_a_configuration_that_trains(capsys):
    status, out = plan(capsys, "shrink", "--preset", "deepseek-v3")
    assert status == 0
    small = parse_run(out, "shrunk").run
    model = small.model
    assert (model.hidden, model.layers, model.moe.experts, model.moe.top_k, model.moe.shared_experts) == (
        2048, 16, 64, 8, 1
    )  # fmt: skip
    assert model.attention == "mla" and small.parallel.ranks == 8
    assert not refusals(small)


def test_exact_refuses_what_is_only_planned():
    command = [sys.executable, "-m", "pdtrain.cli", "plan", "exact", "--preset", "deepseek-v3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "parallel.pipeline = 16 cannot be trained yet" in done.stderr


@pytest.mark.parametrize("layout", ["8 2 4", "8 1 8", "6 2 2", "5 1 1", "4 4 1"])
def test_exact_counts_what_is_estimated(layout):
    """Uneven shards too: 6 and 5 ranks divide nothing evenly."""
    pytest.importorskip("torch")
    from pdtrain.plan.exact import exact

    ranks, tensor, expert = layout.split()
    run = load_run(
        preset="tiny",
        overrides=[f"parallel.ranks={ranks}", f"modules.attention.tensor={tensor}",
                   f"modules.experts.expert={expert}", "train.train_batch=none", "model.moe.shared_experts=1",
                   "model.ffn_hidden=744", "model.moe.expert_hidden=264"],
    )  # fmt: skip
    found = exact(Setup(run))
    assert found.agrees, found.different
    assert found.kinds[0].first == 0 and found.kinds[-1].last == int(ranks) - 1


@pytest.mark.slow
def test_exact_agrees_for_the_full_model_on_2048_ranks():
    pytest.importorskip("torch")
    from pdtrain.plan.exact import exact

    run = load_run(preset="deepseek-v3", overrides=["parallel.pipeline=1", "modules.attention.tensor=4"], world=2048)
    found = exact(Setup(run))
    assert found.agrees and found.world == 2048


def test_all_shards_together_are_the_model():
    """ZeRO-3 over ranks that divide nothing: every entry is on exactly one rank of its group."""
    run = load_run(preset="tiny", overrides=["parallel.ranks=6", "train.train_batch=none"], world=6)
    setup = Setup(run)
    stage = stages(setup)[0]
    total = 0
    for tensor, number in states.stage_tensors(setup, stage):
        held = sum(states.sharded_entries(tensor, setup, index) for index in range(setup.shard_size(tensor.row)))
        total += number * held * setup.split(tensor.row)
    assert total == count(run.model).trained


def test_bubble_and_micro_batches_in_flight():
    run = load_run(preset="deepseek-v3", overrides=["train.train_batch=7680"])  # 60 micro-batches, 16 stages
    assert bubble(Setup(run)) == 15 / 60  # 1F1B: 25 %
    assert bubble(Setup(run, Options(schedule="interleaved", virtual=2))) == 15 / 120
    assert [in_flight(Setup(run), stage) for stage in (0, 15)] == [16, 1]
    assert in_flight(Setup(run, Options(schedule="dualpipe")), 7) == 17
