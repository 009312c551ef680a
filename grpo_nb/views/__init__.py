"""What a person looks at: pictures, tables, score sheets, and the widgets of the notebooks.

`plots` and `charts` draw, `sheet` shows completions with their scores, `dashboard` a training as
it runs, `infer` asks a run's models, `widgets` are for hands. Nothing here decides anything: a
notebook runs the same without it.
"""
