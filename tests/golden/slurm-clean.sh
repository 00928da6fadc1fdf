#!/bin/sh
scratch=/local
suffix=2k83xnf2
