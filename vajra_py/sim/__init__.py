"""What happens when the mechanism runs on predicted step durations?"""
