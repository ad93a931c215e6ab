"""adapter_slots"""
