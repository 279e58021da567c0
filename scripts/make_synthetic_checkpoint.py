#!/usr/bin/env python3
"""Writes a glm4_moe checkpoint of any size with random weights, NVFP4 experts (ModelOpt dialect) and
BF16 elsewhere: for speed and load measurements, not for text. Needs nothing but Python.

usage: make_synthetic_checkpoint.py DIR [--layers 48] [--hidden 2048] [--experts 128] [--top-k 8] [--inter 768]
           [--heads 32] [--kv-heads 4] [--head-dim 128] [--vocab 151552] [--shared 0] [--context 4096] [--odd-scales 0]

Weights have a spread of about 0.02. E4M3 scales are spread as the block maxima of normal weights are: some 2 %
lie outside a window of 16 codes; one in 4096 is zero. --odd-scales N makes one in N anything, far worse than
trained checkpoints. Random bytes come from one block that is read from changing offsets.
"""
import argparse
import json
import pathlib
import random
import statistics
import struct

SHARD_BYTES = 4 << 30
BLOCK = 64 << 20


class Source:
    """Random bytes through a translation table, from changing offsets of one block."""

    def __init__(self, seed, odd_scales):
        self.random = random.Random(seed)
        raw = self.random.randbytes(BLOCK)
        self.codes = raw
        spread = statistics.NormalDist(0x38, 3.4)
        scales = bytearray(raw.translate(bytes(round(spread.inv_cdf((b + 0.5) / 256)) for b in range(256))))
        for _ in range(BLOCK // 4096):
            scales[self.random.randrange(BLOCK)] = 0
        for _ in range(BLOCK // odd_scales if odd_scales else 0):
            scales[self.random.randrange(BLOCK)] = self.random.randrange(1, 0x78)
        self.scales = bytes(scales)
        high = bytearray(raw[: BLOCK // 2].translate(bytes(0x3C | (b & 0x80) for b in range(256))))
        bf16 = bytearray(BLOCK)
        bf16[0::2] = raw[BLOCK // 2 :]
        bf16[1::2] = high
        self.bf16 = bytes(bf16)

    def write(self, out, kind, count):
        block = getattr(self, kind)
        view = memoryview(block)
        while count > 0:
            begin = self.random.randrange(0, BLOCK // 2, 64)
            part = min(count, BLOCK - begin)
            out.write(view[begin : begin + part])
            count -= part


def tensors(a):
    """(name, dtype, shape, kind) in order; kind is a Source block or the exact bytes."""
    one = struct.pack("<H", 0x3F80)
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim

    def matrix(name, rows, cols):
        yield name + ".weight", "BF16", [rows, cols], "bf16"

    def vector(name, n):
        yield name + ".weight", "BF16", [n], one * n

    def nvfp4(name, rows, cols):
        yield name + ".weight", "U8", [rows, cols // 2], "codes"
        yield name + ".weight_scale", "F8_E4M3", [rows, cols // 16], "scales"
        yield name + ".weight_scale_2", "F32", [], struct.pack("<f", 0.0073)

    def mlp(name, inter):
        yield from nvfp4(name + ".gate_proj", inter, a.hidden)
        yield from nvfp4(name + ".up_proj", inter, a.hidden)
        yield from nvfp4(name + ".down_proj", a.hidden, inter)

    yield from matrix("model.embed_tokens", a.vocab, a.hidden)
    for i in range(a.layers):
        base = f"model.layers.{i}"
        yield from vector(base + ".input_layernorm", a.hidden)
        yield from vector(base + ".post_attention_layernorm", a.hidden)
        yield from matrix(base + ".self_attn.q_proj", q, a.hidden)
        yield from matrix(base + ".self_attn.k_proj", kv, a.hidden)
        yield from matrix(base + ".self_attn.v_proj", kv, a.hidden)
        yield from matrix(base + ".self_attn.o_proj", a.hidden, q)
        yield from vector(base + ".self_attn.q_norm", a.head_dim)
        yield from vector(base + ".self_attn.k_norm", a.head_dim)
        yield from matrix(base + ".mlp.gate", a.experts, a.hidden)
        yield base + ".mlp.gate.e_score_correction_bias", "F32", [a.experts], bytes(4 * a.experts)
        for e in range(a.experts):
            yield from mlp(f"{base}.mlp.experts.{e}", a.inter)
        if a.shared:
            yield from mlp(base + ".mlp.shared_experts", a.shared * a.inter)
    yield from vector("model.norm", a.hidden)
    yield from matrix("lm_head", a.vocab, a.hidden)


def size_of(dtype, shape):
    n = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}[dtype]
    for d in shape:
        n *= d
    return n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("dir")
    for name, value in (("layers", 48), ("hidden", 2048), ("experts", 128), ("top-k", 8), ("inter", 768), ("heads", 32),
                        ("kv-heads", 4), ("head-dim", 128), ("vocab", 151552), ("shared", 0), ("context", 4096), ("odd-scales", 0)):
        p.add_argument("--" + name, type=int, default=value)
    a = p.parse_args()
    out = pathlib.Path(a.dir)
    out.mkdir(parents=True)
    shards, size = [[]], 0
    for t in tensors(a):
        n = size_of(t[1], t[2])
        if size + n > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += n
    source, weight_map, total = Source(1, a.odd_scales), {}, 0
    for i, shard in enumerate(shards):
        file_name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name, dtype, shape, _ in shard:
            n = size_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
            weight_map[name] = file_name
            at += n
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(out / file_name, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for name, dtype, shape, kind in shard:
                if isinstance(kind, bytes):
                    f.write(kind)
                else:
                    source.write(f, kind, size_of(dtype, shape))
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    ignore = ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16", "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "first_k_dense_replace": 0, "head_dim": a.head_dim,
        "hidden_act": "silu", "hidden_size": a.hidden, "intermediate_size": a.inter,
        "max_position_embeddings": a.context, "moe_intermediate_size": a.inter, "n_group": 1, "topk_group": 1,
        "n_routed_experts": a.experts, "n_shared_experts": a.shared, "norm_topk_prob": True,
        "num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, "num_experts_per_tok": a.top_k,
        "num_hidden_layers": a.layers, "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "use_qk_norm": True,
        "vocab_size": a.vocab,
        "quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt", "ignore": ignore,
                                "producer": {"name": "synthetic", "version": "1"}, "group_size": 16},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{out}: {len(weight_map)} tensors, {len(shards)} shards, {total} bytes")


if __name__ == "__main__":
    main()
