"""Tiny random models as GGUF files, written the way llama.cpp's converter lays them out."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 6, 64, 4, 2, 32, 96, 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    untied: bool = False,
    drop: str | None = None,
    extra: str | None = None,
    rope_freqs: np.ndarray | None = None,
    chat_template: str | None = None,
    splitter: str = "smollm",
) -> None:
    """Write a random model: matrices in Q8_0, norms and biases in float32."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    _add_sizes(writer, architecture)
    tokens = _add_tokenizer(writer, architecture, splitter)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in tensor_shapes(architecture, len(tokens), untied=untied).items():
        if name == drop:
            continue
        values = random.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 2:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values + (0 if name.endswith("bias") else 1))
    if extra is not None:
        writer.add_tensor(extra, np.ones((4,), np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(architecture: str, vocab: int, *, untied: bool) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "gemma3":
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if untied:
        shapes["output.weight"] = (vocab, HIDDEN)
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def tiny_folder(folder: Path) -> torch.nn.Module:
    """Write a tiny random target folder with transformers, and return its model."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(32)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return model


def _add_sizes(writer: GGUFWriter, architecture: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    if architecture == "llama":
        writer.add_rope_dimension_count(HEAD_DIM)
    if architecture == "gemma3":
        writer.add_sliding_window(8)


def _add_tokenizer(writer: GGUFWriter, architecture: str, splitter: str) -> list[str]:
    if architecture == "gemma3":
        return _add_sentencepiece(writer)
    return _add_byte_level(writer, splitter)


def _add_byte_level(writer: GGUFWriter, splitter: str) -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab", "ĠĠ", "12", "whole"]
    tokens += [f"<unused{index}>" for index in range(-len(tokens) % 32)]
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(2)
    return tokens


def _add_sentencepiece(writer: GGUFWriter) -> list[str]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *pieces, "▁", "a", "b", "ab"]
    tokens += [f"<unused{index}>" for index in range(-len(tokens) % 32)]
    kinds = [3] * 4 + [6] * 256 + [1] * (len(tokens) - 260)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    return tokens
