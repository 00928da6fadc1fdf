keeps_record=0
cpus_per_rank=0
interpreter=/opt/venv/bin/python
set -- /opt/venv/bin/python -I -S "$cloudjob_here/jobentry.pyz" \
    train.py --name 'it'"'"'s $HOME'
