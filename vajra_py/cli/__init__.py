"""What can be asked of the framework from a shell?"""
