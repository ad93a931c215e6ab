"""reference_engine"""
