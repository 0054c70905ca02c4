"""Random calls of attention, judged by the error rule: cases.py draws them, judge.py says what is wrong, see run.py."""
