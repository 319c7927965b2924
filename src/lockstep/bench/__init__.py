"""What does a strategy cost?"""
