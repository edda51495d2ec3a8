"""output_processor"""
