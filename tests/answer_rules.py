r"""What counts as a right answer, rule by rule: `reference | answer | answer`, and what is refused.

docs/rewards.md shows the first row of each rule.
"""

PMATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
RIGHT = r"""
# numbers: decimals, thousands, fractions, powers of ten, exactly
18 | 18.0 | 36/2 | +18.
1875 | $1,875.00
12345 | 12\,345 | 12 345
11111111100 | 11,\! 111,\! 111,\! 100
1{,}000{,}000 | 1,000,000
3/2 | 1 1/2
\frac{7}{3} | 2\frac{1}{3}
30000 | 3 \times 10^{4}
1/2 | ½
1/2 | .5 | 1.5/3
-3 | −3
20 | € 20 | 20 €
18 | `18` | １８
100000 | 1e5
9007199254740993 | 9007199254740993.0
-\frac{1}{2} | −\frac{1}{2}
# a decimal comma, where it can be nothing else
1000.5 | 1000,5
1,22 | 1.22
2.74 | costs: 2,74 $
# a percentage is its number, or its hundredth
28\% | 28 | 28 percent | $28$% | $\boxed{28}$ pct
\frac{1}{2} | 50\% | $50$%
# units: of a list, in \text{…}, or up to two words
18 | 18 apples | 18 square meters | 18 km/h | 18 m^2 | 18\text{ apples} | 18 \text{ square feet}
18 | 18\,\mathrm{cm}^2
18 \text{ cm} | 18
$125$ miles | \boxed{125\textnormal{ miles}}
90^\circ | 90
# a decimal of four places or more, for a reference that has no end
1/3 | 0.3333
(\frac{3}{5},\frac{8}{3}] | (0.6,2.6667]
# words around it
18 | the answer is 18 | It follows that $x = 18$. | 18 is the answer
x >= 5 | Therefore $x \geq 5$ is the solution.
34 | Final Answer: The largest $n$ is 34. | The largest $n$ is $34$.
PMATRIX | The sum is $PMATRIX$.
# dollars, boxes, Markdown, brackets of LaTeX
18 | \boxed{18} | $\boxed{18}$. | \[18\] | **18** | \begin{align} x = 18 \end{align}
x+y | \boxed{y+x} | $n = \boxed{y+x}$
x \in \boxed{\{-1\} \cup [0,7)}. | \{-1\} \cup [0, 7)
# spellings of LaTeX, Unicode and plain text
\frac{1}{2} | \dfrac12 | \frac 1 2
\sqrt{3} | sqrt(3)
2\sqrt{3} | 2√3
2\pi | 2pi
\pi r^2 | r^2 \cdot π
x \le 3 | x ≤ 3
(3, \frac{\pi}{2}) | \\left( 3, \\frac{\\pi}{2} \\right)
# equal as mathematics
\frac{1}{2} | \frac{2}{4}
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
x^2-1 | (x-1)(x+1)
3+4i | 4i+3
\tan x | \frac{\sin x}{\cos x}
\log_2 8 | 3
2^{3} \cdot 3^{2} | 72
10 | (9+1)
# the value of an equation of one name; chains that hold
x=5 | x = 5 | 5
1/3 | $k = \frac13$
x = 1/3 | x = 1/3 \approx 0.333
(p,q)=(3,2) | (3,2)
y=2x+3 | 2x-y+3=0
x^2+1 | f(x) = x^2 + 1
x^2-2x+10=0 | 2x^2-4x+20=0
2x+4y-3=0 | y=-\frac{1}{2}x+\frac{3}{4}
# inequalities, and the interval that they say
x > 3 | 3 < x
x < 1 | -x > -1
-2 \le x \le 7 | x \in [-2,7]
0<f(x)<1 | (0,1)
[5, \infty) | x \ge 5
\{x \mid x > 2\} | x > 2
x \neq 5 | x != 5
# intervals and unions
(1, 2] | \left( 1, 2 \right]
(-\infty,1)\cup(2,\infty) | (2,\infty)\cup(-\infty,1)
# tuples, part by part
(3,-4) | (3, -4)
(1,\frac{9}{2}) | (1,4.5)
# sets and lists, in any order
\{1,2,3\} | \{3, 2, 1\}
\{1,2\} | 1, 2
1, 2 | \{2, 1\}
1 and 2 and 3 | {3,2,1}
21,16 or 11 | 11, 21, 16
(11,7)or(7,11) | \boxed{(7,11),\ (11,7)}
x=1, x=2 | 2 or 1
\{2,-2\} | x = \pm 2
1 \pm \sqrt{19} | 1-\sqrt{19}, 1+\sqrt{19}
# values of several names, by name or in order
k = 45, n = 2 | n = 2 and k = 45 | (45, 2)
# several boxes are a list
\boxed{1}\boxed{2} | \boxed{2} and \boxed{1}
# matrices in any environment
PMATRIX | \begin{bmatrix}1&2\\3&4\end{bmatrix}
PMATRIX | \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right]
# words, up to case
no solution | \text{No solution}
\text{(C)} | \text{C}
""".replace("PMATRIX", PMATRIX)
WRONG = r"""
# two candidates
18 | 17 or 18 | 17or18 | 17\text{ or }18 | 17 \lor 18 | 17 and 18 | 17, 18 | 18; 17 | \{17, 18\}
18 | $17$ $18$ | $17$, $18$ | 17, 18, 19 | **18** **17** | \pm 18 | 17...18 | 18 (or 17)
18 | answer: 17, answer: 18
x=5 | x=5 or x=6
odd | odd or even
# boxes that contradict, or more beside the box
18 | \boxed{17}\boxed{18} | \boxed{18} or \boxed{17} | 17 \boxed{18} | \boxed{18} 17
# what denies, hedges or reckons on
18 | it is not 18 | 18 \text{ is wrong} | \text{not }18 | maybe 18 | at least 18
x+1 | $1+x \text{ is wrong}$ | \boxed{1+x\text{ not}} | $\text{not } 1+x$
18 | between 17 and 19 | twice 18 | 18 thousand | 18 squared | 18\text{ or 17}
18 | 18 \text{ or maybe it is 17} | the answer is 17. No, 18 | not 17 but 18
# prose that contains it
18 | I counted 18 eggs and 2 hens | the largest of 17 and 18 is 19
3 | the 3 numbers
2 | 2nd
# a letter is a factor, not a unit
2n | 2
3x | 3
3m | 3
5! | 5
2\pi | 2
3t | 3
18 | 18x
# numbers side by side
18 | 17 1 | 17\quad 1 | 17 \ldots 1 | 17 \text{ } 1 | 1\text{}8 | 17 \displaystyle 1
18 | 17^\circ 1 | 18_17
204_5 | 204
32349 | 32, 349
1 | 1e5
100000e | 1e5
# relations that do not hold, or say another thing
18 | 17 = 18 | 18 = 17 | x = 18 = 17
x=18 | x = 17 = 18
18 | 18 \approx 17 | 18 \neq 17 | x \in \{18\} | 17 → 18 | x > 18
x = 11 | x = 5+5+1 = 7 = 11
2x+z = 1 | 1
x=5 | y=5
x^2-2x+10=0 | x^2-3x+10=0 | x^2-2x+10=0 ab | x^2-2x+10=0 mod 7
\log 2 = -6 | \log 2 = -63
x>3 | x \ge 3 | x<3 | y>3 | 3
0<x<1 | [0,1] | \{0,1\} | 0,1
12:00 | 1:00
# other brackets, ends, order or number of parts
(1,2) | [1,2] | \{1,2\} | 1, 2 | (2,1)
(3,1) | {1,3}
(-\infty,1) | (-\infty,1]
(3,\infty) | x \ge 3
\{1,2\} | \{1,2,3\} | 1 | 1, 2, 3
k = 45, n = 2 | k = 2, n = 45 | 2, 45 | (45, 2)'
1 \pm \sqrt{2} | 1+\sqrt{2}
PMATRIX | \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
# another value
18 | -18 | 18.5 | 17 + 1 = 19 | \frac{18} | 18+ | 18' | 18} | 18)(
\frac{1}{3} | 0.333
0.12345 | 0.1235
\frac{1}{2} | \frac{2}{1}
50\% | 0.05
\sqrt{2} | 2
\frac12 | \frac102
1e-5 | e-5
9007199254740993 | 9007199254740992
x+1 | x-1
x | y
f(x) | f'(x) | f(y)
\infty | -\infty
\text{Paris} | \text{London}
# no mathematics
18 | $ $
18 |
18 | six times three
""".replace("PMATRIX", PMATRIX)


def rows(table):
    """(rule, reference, answer) of each answer."""
    rule = ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            rule = line[2:]
        else:
            reference, *answers = line.split(" |")
            yield from ((rule, reference, answer.strip()) for answer in answers)
