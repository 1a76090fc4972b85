"""Style and script of report.html. No font, picture or script is fetched: the page works from a file, offline."""

from __future__ import annotations

from docklands.obs.drawing import THEMES

RULES = """
* { box-sizing: border-box; }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
  "Helvetica Neue",Arial,sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 20px 60px; }
header { display:flex; gap:12px 20px; align-items:flex-start; justify-content:space-between; flex-wrap:wrap; }
h1 { font-size:26px; margin:0; letter-spacing:-.01em; } h2 { font-size:18px; margin:38px 0 12px; }
h3 { font-size:14px; margin:0 0 6px; font-weight:600; }
p.sub, .muted { color:var(--muted); } p.sub { margin:4px 0 0; }
p.note { color:var(--muted); font-size:13px; margin:8px 0; }
button, input { font:inherit; color:inherit; background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:5px 12px; } button { cursor:pointer; }
.badge { display:inline-block; border-radius:99px; padding:1px 10px; font-size:13px; font-weight:600;
  vertical-align:4px; margin-left:10px; background:var(--goodbg); color:var(--good); }
.badge.warn { background:var(--badbg); color:var(--bad); }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(205px,1fr)); gap:14px; margin-top:22px; }
.card { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:14px 16px; min-width:0; }
.card .label { font-size:13px; color:var(--muted); } .card .value { font-size:22px; font-weight:650; line-height:1.3;
  font-variant-numeric:tabular-nums; white-space:nowrap; } .card .value .arrow { color:var(--muted); font-weight:400; }
.card .foot { font-size:13px; color:var(--muted); } .up { color:var(--good); } .down { color:var(--bad); }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(330px,1fr)); gap:14px; }
.wide { grid-column:1/-1; } svg { display:block; width:100%; height:auto; overflow:visible; }
svg text { fill:var(--muted); font-size:11px; font-variant-numeric:tabular-nums; } svg text.ink { fill:var(--ink); }
svg .rule { stroke:var(--line); stroke-width:1; } svg .raw { fill:none; stroke-width:1.2; opacity:.35; }
svg .smooth { fill:none; stroke-width:2.2; stroke-linejoin:round; stroke-linecap:round; }
svg .thin { stroke:var(--c0); stroke-width:1.5; }
svg .cross { stroke:var(--muted); stroke-dasharray:3 3; visibility:hidden; } svg .dot { visibility:hidden; }
svg .box { fill:var(--card); stroke:var(--line); stroke-width:1.5; } svg .edge { fill:none; stroke:var(--muted);
  stroke-width:1.4; } svg .back { stroke:var(--accent); stroke-dasharray:5 4; }
svg text.bar { fill:#fff; font-size:10.5px; } svg .head { fill:var(--muted); } svg .head.blue { fill:var(--accent); }
.scroll { overflow-x:auto; } .legend { display:flex; flex-wrap:wrap; gap:4px 16px; font-size:13px; color:var(--muted);
  margin-top:8px; } .legend i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px;
  vertical-align:-1px; }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:0 14px; } .pair>.card { margin-bottom:14px; }
.prompt { grid-column:1/-1; font-weight:600; margin:6px 0 8px; white-space:pre-wrap; overflow-wrap:anywhere; }
.text { white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,
  "DejaVu Sans Mono",monospace; margin:6px 0 0; max-height:22em; overflow-y:auto; }
.chip { display:inline-block; border-radius:6px; padding:0 8px; font-size:12.5px; background:var(--soft);
  color:var(--muted); margin-right:6px; } .chip.good { background:var(--goodbg); color:var(--good); }
.chip.bad { background:var(--badbg); color:var(--bad); }
details { margin-top:10px; background:var(--card); border:1px solid var(--line); border-radius:12px; }
summary { cursor:pointer; padding:10px 16px; font-weight:600; } details>.in { padding:2px 16px 14px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--muted); font-weight:600; } th,td { padding:5px 10px 5px 0; vertical-align:top;
  border-bottom:1px solid var(--line); } td.n, th.n { text-align:right; } tr:last-child td { border-bottom:0; }
td .text { margin:0; max-height:12em; } td svg { width:120px; height:22px; } td.name { font-family:ui-monospace,
  SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:12.5px; overflow-wrap:anywhere; }
pre { margin:0; overflow-x:auto; font-size:12.5px; } .missing { border-style:dashed; color:var(--muted); }
#tip { position:fixed; pointer-events:none; background:var(--ink); color:var(--bg); border-radius:6px; padding:3px 9px;
  font-size:12.5px; display:none; z-index:9; font-variant-numeric:tabular-nums; }
@media (max-width:640px) { .pair { grid-template-columns:1fr; } h1 { font-size:22px; } }
@media print { button, #filter { display:none; } details, .card { break-inside:avoid; } }
"""

STYLE = THEMES + RULES

SCRIPT = """
(function () {
  var root = document.documentElement;
  document.getElementById('theme').addEventListener('click', function () {
    var dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    root.dataset.theme = dark ? 'light' : 'dark';
  });
  var tip = document.getElementById('tip');
  document.querySelectorAll('svg[data-x]').forEach(function (svg) {
    var xs = svg.dataset.x.split(','), px = svg.dataset.px.split(',').map(Number);
    var ys = svg.dataset.y.split(','), py = svg.dataset.py.split(',').map(Number);
    var cross = svg.querySelector('.cross'), dot = svg.querySelector('.dot'), width = svg.viewBox.baseVal.width;
    svg.addEventListener('mousemove', function (event) {
      var box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width, best = 0;
      px.forEach(function (p, i) { if (Math.abs(p - at) < Math.abs(px[best] - at)) best = i; });
      cross.setAttribute('x1', px[best]); cross.setAttribute('x2', px[best]);
      dot.setAttribute('cx', px[best]); dot.setAttribute('cy', py[best]);
      cross.style.visibility = dot.style.visibility = 'visible';
      tip.textContent = 'step ' + xs[best] + ': ' + ys[best]; tip.style.display = 'block';
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
      tip.style.top = event.clientY - 34 + 'px';
    });
    svg.addEventListener('mouseleave', function () {
      cross.style.visibility = dot.style.visibility = 'hidden'; tip.style.display = 'none';
    });
  });
  var filter = document.getElementById('filter');
  if (filter) filter.addEventListener('input', function () {
    document.querySelectorAll('#metrics tbody tr').forEach(function (row) {
      row.hidden = row.cells[0].textContent.indexOf(filter.value) < 0;
    });
  });
})();
"""
