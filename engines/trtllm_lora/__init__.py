"""trtllm_lora"""
