"""The container half of cloudjob: reads its environment, makes a plan, acts on it, leaves a record.

Standard library only, Python >= 3.8, because it must run in any image.
"""
