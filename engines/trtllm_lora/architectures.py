"""Which base models an engine can be of: names of `architectures[0]` in a Hugging Face config.json.

Source: `MODEL_MAP` of TensorRT-LLM's engine line (`tensorrt_llm/models/__init__.py`), its decoders of text. The
checkpoint conversion writes the same name into the engine's config.json (`architecture=hf_config.architectures[0]`).
"""

from __future__ import annotations

COMPILED = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "QWenForCausalLM", "QWenLMHeadModel"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "RecurrentGemmaForCausalLM"),
    *("PhiForCausalLM", "Phi3ForCausalLM", "Phi3SmallForCausalLM", "PhiMoEForCausalLM", "Phi4MMForCausalLM"),
    *("GPTForCausalLM", "GPT2LMHeadModel", "GPT2LMHeadCustomModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM"),
    *("GPTNeoXForCausalLM", "GPTJForCausalLM", "JAISLMHeadModel", "NemotronForCausalLM", "DeciLMForCausalLM"),
    *("OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "RWForCausalLM", "MPTForCausalLM", "MptForCausalLM"),
    *("ChatGLMForCausalLM", "ChatGLMForConditionalGeneration", "ChatGLMModel", "GLMModel"),
    *("BaichuanForCausalLM", "BaiChuanForCausalLM", "InternLMForCausalLM", "InternLM2ForCausalLM"),
    *("SkyworkForCausalLM", "ExaoneForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "ArcticForCausalLM"),
    *("CohereForCausalLM", "DbrxForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM", "Grok1ModelForCausalLM"),
    "MambaForCausalLM",
)
"""Architectures that an engine can be compiled from."""
REFERENCE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Architectures that this project's reference engine computes."""
