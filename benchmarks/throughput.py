"""Tokens a second of hidden-state extraction, beside plain prefill, in one run on one machine.

    python benchmarks/throughput.py                       Llama-8B dimensions, bfloat16, a GPU
    python benchmarks/throughput.py --model small         what a CPU can do
    python benchmarks/throughput.py --record results.json

Needs vLLM, speculators and this package. Weights are random (vLLM's dummy loader), so only
speed is measured. Each way runs in a process of its own, one after the other:

- plain: vllm.LLM, one token sampled, nothing captured
- generator: VllmHiddenStatesGenerator with this package
- through RPC: the same with SPECULATORS_VLLM_COMPAT_RING_MB=0
- connector: vLLM's own hidden-state connector, its files read back into memory
- speculators: speculators' own loop and transport, with what else the pair needs
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
BUDGET = 8192  # tokens of a step
WAYS = ("plain", "generator", "through RPC", "connector", "speculators")
# What is left out so that speculators' own capture, loop and transport run.
OWN_TRANSPORT = "generate_loop,decoder_layer_call,worker_plugin,language_model,rpc_reply"

SIZES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def model_folder(size: str, folder: Path) -> Path:
    """A folder with a config and a tokenizer, and no weights."""
    from transformers import LlamaConfig

    from tiny_models import build_tokenizer

    config = LlamaConfig(**SIZES[size], max_position_embeddings=8192, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    import torch

    seed = torch.Generator().manual_seed(count * 100003 + tokens)
    return torch.randint(4, vocabulary, (count, tokens), generator=seed).tolist()


def layer_ids(size: str, count: int) -> list[int]:
    """Spread over the model, the last one included."""
    layers = SIZES[size]["num_hidden_layers"]
    return [layers - 1 - index * layers // count for index in range(count)]


def plain(folder: Path, options: argparse.Namespace) -> Callable[[list[list[int]]], Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), **_llm_arguments(options))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return lambda batch: llm.generate(
        [{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False
    )


def connector(folder: Path, options: argparse.Namespace) -> Callable[[list[list[int]]], Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        load_hidden_states,
    )

    stored = tempfile.mkdtemp(dir="/dev/shm")
    # vLLM's ids count layer inputs; the id behind the last layer is the last layer's output.
    ids = [i + 1 for i in layer_ids(options.model, options.layers)]
    llm = LLM(
        str(folder),
        **_llm_arguments(options),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted(ids)}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": stored},
        },
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0)

    def run(batch: list[list[int]]) -> Any:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False
        )
        read = []
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            read.append({k: v.clone() for k, v in load_hidden_states(path).items()})
            for file in (Path(path), Path(path + ".lock")):
                file.unlink(missing_ok=True)
        return read

    return run


def generator(folder: Path, options: argparse.Namespace) -> Callable[[list[list[int]]], Any]:
    import speculators_vllm_compat  # noqa: F401 - switches the patches on

    module = importlib.import_module(GENERATOR)

    class Generator(module.VllmHiddenStatesGenerator):
        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._create_vllm_config(*args, **kwargs)
            config.load_config.load_format = "dummy"
            return config

    made = Generator(
        str(folder),
        layer_ids(options.model, options.layers),
        max_model_len=options.max_model_len,
        gpu_memory_utilization=options.memory,
        max_num_batched_tokens=BUDGET,
    )
    own = options.way == "speculators"

    def run(batch: list[list[int]]) -> Any:
        if not own:
            return made.generate(batch)
        # speculators' own loop takes no more than 32 sequences a call.
        return [r for start in range(0, len(batch), 32) for r in made.generate(batch[start:][:32])]

    run.generator = made  # type: ignore[attr-defined]
    return run


def _llm_arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": BUDGET,
        "gpu_memory_utilization": options.memory,
        "disable_log_stats": True,
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One way's timings, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(options.model, Path(folder))
        makers = {"plain": plain, "connector": connector}
        started = time.perf_counter()
        run = makers.get(options.way, generator)(path, options)
        start_up = time.perf_counter() - started
        vocabulary = SIZES[options.model]["vocab_size"]
        for count, tokens in options.loads:
            batch = prompts(count, tokens, vocabulary)
            run(batch)
            seconds = []
            for _ in range(options.repeats):
                started = time.perf_counter()
                run(batch)
                seconds.append(time.perf_counter() - started)
            yield {
                "way": options.way,
                "layers": options.layers,
                "prompts": count,
                "tokens": tokens,
                "tokens_per_second": count * tokens / statistics.median(seconds),
                "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
                "start_up_seconds": round(start_up, 1),
                "peak_device_bytes": _peak(run),
            }


def _peak(run: Any) -> int | None:
    """The most device memory the worker ever held for tensors, in bytes."""
    made = getattr(run, "generator", None)
    if made is None:
        return None
    found = made.executor.collective_rpc(_peak_in_worker, unique_reply_rank=0)
    return found[0] if isinstance(found, list) else found


def _peak_in_worker(_worker: Any) -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def run_way(way: str, arguments: list[str], limit: float) -> list[dict[str, Any]]:
    """One way's timings, from a process of its own that is ended with all it has started."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    variables["SPECULATORS_VLLM_COMPAT"] = "on"
    # The driver asks for the GPU's memory, after which a fork could not use it.
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if way == "through RPC":
        variables["SPECULATORS_VLLM_COMPAT_RING_MB"] = "0"
    if way == "speculators":
        variables["SPECULATORS_VLLM_COMPAT_SKIP"] = OWN_TRANSPORT
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the only one its own capture works with
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out, tempfile.TemporaryFile() as log:
        command = [sys.executable, __file__, *arguments, "--way", way, "--out", out.name]
        process = subprocess.Popen(
            command, env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        rows = [json.loads(line) for line in out.read().splitlines()]
        if status != 0:
            log.seek(0)
            print(f"{way}: {status}\n{log.read().decode(errors='replace')[-3000:]}", flush=True)
    show(rows)
    return rows


def load(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    return int(count), int(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="llama-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--loads", type=load, nargs="+", default=[(8, 1024), (32, 1024), (128, 1024)]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--max-model-len", type=int, default=4097)
    parser.add_argument("--limit", type=float, default=600, help="seconds, for each way")
    parser.add_argument("--record", type=Path, help="append the results to this JSON file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        with options.out.open("w") as out:
            for row in measure(options):
                out.write(json.dumps(row) + "\n")
                out.flush()
        os._exit(0)  # an engine's own shutdown is not what is measured
    skip = {"--ways", "--record", "--limit"}
    arguments, taking = [], True
    for word in sys.argv[1:]:
        taking = word not in skip if word.startswith("--") else taking
        arguments += [word] * taking
    rows = [row for way in options.ways for row in run_way(way, arguments, options.limit)]
    print()
    show(rows)
    if options.record:
        record(options, rows)
    return 0 if {row["way"] for row in rows} == set(options.ways) else 1


def show(rows: list[dict[str, Any]]) -> None:
    heads = f"{'prompts x tokens':18}{'layers':8}{'way':14}"
    print(heads + f"{'tokens/s':>10}{'of plain':>10}{'spread':>9}")
    base = {
        (r["prompts"], r["tokens"]): r["tokens_per_second"] for r in rows if r["way"] == "plain"
    }
    for row in sorted(rows, key=lambda r: (r["tokens"], r["prompts"])):
        plain_speed = base.get((row["prompts"], row["tokens"]))
        ratio = f"{row['tokens_per_second'] / plain_speed:.2f}" if plain_speed else "-"
        print(
            f"{row['prompts']:>4} x {row['tokens']:<11}{row['layers']:<8}{row['way']:14}"
            f"{row['tokens_per_second']:>10,.0f}{ratio:>10}{row['spread']:>9.1%}"
        )


def record(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from importlib import metadata

    import torch

    cuda = torch.cuda.is_available()
    entry = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores",
        "model": options.model,
        "vllm": next(
            (d.version for d in metadata.distributions() if d.metadata["Name"].startswith("vllm")),
            "",
        ),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    known = json.loads(options.record.read_text()) if options.record.is_file() else []
    options.record.write_text(json.dumps([*known, entry], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
