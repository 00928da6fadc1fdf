#!/bin/sh
scratch=/local
suffix=2k83xnf2
setup_shell='/bin/bash -l'
