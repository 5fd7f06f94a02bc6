"""llama.cpp in a process of its own: writes a GGUF of random blocks, runs it, answers with seconds.

    python benchmarks/peers_llama.py write GEOMETRY.json KIND FILE.gguf
    python benchmarks/peers_llama.py serve FILE.gguf THREADS      # then lines `prefill N` or `decode STREAMS STEPS`

Needs `gguf`, `llama-cpp-python` and numpy, and nothing of this package, so that it can run in another environment.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 1024
"""Tokens that all streams together may hold."""

PAST = 8
"""Tokens that a stream has behind it when its decode steps are timed."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def make_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Bytes:
    """Random quantised blocks uint8 [rows, bytes of a row] whose restored values are about 1 / sqrt(columns)."""
    size, width = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q2_K": (256, 84)}[kind]
    blocks = rng.integers(0, 256, (rows, columns // size, width), np.uint8)
    step = columns**-0.5 / {"Q4_0": 4.6, "Q8_0": 74, "Q2_K": 8.5}[kind]
    half = np.frombuffer(np.float16(step).tobytes(), np.uint8)
    if kind == "Q2_K":  # scales[16], codes[64], d, dmin: weight = d * scale * code - dmin * minimum
        blocks[..., :16] = 0xB7
        blocks[..., 80:82] = blocks[..., 82:84] = half
    else:
        blocks[..., :2] = half
    return blocks.reshape(rows, -1)


def write_gguf(geometry: dict[str, Any], kind: str, path: Path) -> None:
    """Write a model of `geometry` with every matrix of the experts and of attention, and the head, in `kind`."""
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(str(path), geometry["architecture"])
    hidden, layers, experts = geometry["hidden"], geometry["layers"], geometry["experts"]
    heads, kv_heads, width, inner = (geometry[name] for name in ("heads", "kv_heads", "head_dim", "intermediate"))
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(geometry["top_k"])
    writer.add_expert_feed_forward_length(inner)
    writer.add_vocab_size(geometry["vocab"])
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    quantised = gguf.GGMLQuantizationType[kind]

    def matrix(name: str, rows: int, columns: int, count: int = 0) -> None:
        blocks = make_blocks(kind, max(count, 1) * rows, columns, rng)
        shaped = blocks.reshape(count, rows, -1) if count else blocks
        writer.add_tensor(name, shaped, raw_dtype=quantised)

    matrix("token_embd.weight", geometry["vocab"], hidden)
    matrix("output.weight", geometry["vocab"], hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    norm = geometry["query_norm"]
    for layer in range(layers):
        at = f"blk.{layer}."
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", norm), ("attn_k_norm", norm)):
            writer.add_tensor(f"{at}{name}.weight", np.ones(size, np.float32))
        matrix(f"{at}attn_q.weight", heads * width, hidden)
        matrix(f"{at}attn_k.weight", kv_heads * width, hidden)
        matrix(f"{at}attn_v.weight", kv_heads * width, hidden)
        matrix(f"{at}attn_output.weight", hidden, heads * width)
        router = rng.standard_normal((experts, hidden)).astype(np.float32) * np.float32(hidden**-0.5)
        writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        matrix(f"{at}ffn_gate_exps.weight", inner, hidden, experts)
        matrix(f"{at}ffn_up_exps.weight", inner, hidden, experts)
        matrix(f"{at}ffn_down_exps.weight", hidden, inner, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A loaded model; every call starts from an empty cache."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp  # noqa: PLC0415

        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        lib.llama_log_set(pass_on_errors, ctypes.c_void_p(0))
        model_options = lib.llama_model_default_params()
        model_options.use_mmap = False  # as our arena: anonymous memory
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_options)
        assert self.model, f"llama.cpp cannot load {path}"
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 64 * 64, 512, 512, 64
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, options)
        assert self.context
        self.batch = lib.llama_batch_init(512, 0, 1)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.rng = np.random.default_rng(0)

    def step(self, entries: list[tuple[int, int, bool]]) -> None:
        """One llama_decode of (sequence, position, whether logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (sequence, position, logits) in enumerate(entries):
            batch.token[i] = int(self.rng.integers(0, self.vocab))
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = position, 1, sequence, logits
        assert self.lib.llama_decode(self.context, batch) == 0
        self.lib.llama_synchronize(self.context)

    def clear(self) -> None:
        """Forget all sequences."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of `tokens`, logits of its last token."""
        self.clear()
        start = time.perf_counter()
        self.step([(0, position, position == tokens - 1) for position in range(tokens)])
        return time.perf_counter() - start

    def decode(self, streams: int, steps: int) -> float:
        """Seconds of one step of `streams` sequences, median of `steps`, each with PAST tokens behind it."""
        self.clear()
        for stream in range(streams):
            self.step([(stream, position, False) for position in range(PAST)])
        times = []
        for step in range(steps):
            start = time.perf_counter()
            self.step([(stream, PAST + step, True) for stream in range(streams)])
            times.append(time.perf_counter() - start)
        return float(np.median(times))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def pass_on_errors(level: int, text: bytes, _: Any) -> None:
    """Write what llama.cpp says of errors to stderr."""
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


def serve(path: Path, threads: int) -> None:
    """Answer each line of stdin with seconds on stdout."""
    llama = Llama(path, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(getattr(llama, what)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_gguf(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], Path(sys.argv[4]))
    else:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
