"""lora_slots"""
