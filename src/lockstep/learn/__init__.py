"""The course: exercises that one fills in, and real ranks that grade them.

master.py     one marked-up file makes the skeleton, the solution and every named wrong solution
lesson.py     what a lesson is: a text, a file to fill in, a manifest, a grader
course.py     the learner's folder and what has passed there
recorder.py   on a rank: every call of torch.distributed that an exercise makes
rank.py       what a grader has in its hands, on each rank
confined.py   what keeps an exercise in its place: its time, its way out, what is said below it
overseer.py   what watches over the ranks from outside
drawing.py    the messages between ranks, as a picture in text
check.py      start the ranks, grade, and explain what went wrong
lessons/      the lessons themselves

Nothing is imported here: torch takes seconds, and most of what a learner asks does not need it.
"""
