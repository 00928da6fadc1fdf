"""MoXing for another framework: ``file`` only; its training API is not emulated."""

from moxing.framework import file as file
