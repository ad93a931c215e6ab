"""peft_to_trtllm"""
