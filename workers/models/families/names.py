"""The model types that the kernels compute, for commands that do not import torch."""

NAMES = """
afmoe apertus arcee axk1 bamba bitnet cohere cohere2 cohere2_moe cwm dbrx deepseek_v2 deepseek_v3
dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 flex_olmo gemma gemma2 gemma3_text
gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kimi_linear
laguna lfm2 lfm2_moe lfm3 llama llama4_text mellum minicpm3 minimax_m2 ministral ministral3 mistral
mixtral nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt phi phi3 phi4_multimodal
phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_mla
sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
DESCRIBED = frozenset(NAMES.split())  # the keys of `registry.FAMILIES`
