"""The part of MoXing that is emulated: ``moxing.framework.file``, also called ``moxing.file``."""

from moxing.framework import file as file
