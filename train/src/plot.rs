//! A training's course as SVG pictures.

use crate::history::{History, Load};
use std::collections::BTreeSet;
use std::fmt::Write;

const WIDTH: f64 = 720.0;
/// Room for the names of layers, of up to 30 letters.
const LEFT: f64 = 206.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 40.0;
/// Points of a line, columns of a table: more would not be seen.
const COLUMNS: usize = 120;

/// The loss of every step, and its mean over stretches of the training.
pub fn loss(history: &History) -> String {
    let losses: Vec<(f64, f64)> = history.losses().map(|(step, loss)| (step as f64, loss)).collect();
    let mut svg = start(LINES, "Loss");
    let scale = Scale::of(&losses);
    scale.axes(&mut svg);
    let line = |points: &[(f64, f64)]| scale.points(points);
    let stride = losses.len().div_ceil(10 * COLUMNS).max(1);
    let every: Vec<(f64, f64)> = losses.iter().step_by(stride).copied().collect();
    let mean = |stretch: &[(f64, f64)]| {
        let n = stretch.len() as f64;
        (stretch.iter().map(|p| p.0).sum::<f64>() / n, stretch.iter().map(|p| p.1).sum::<f64>() / n)
    };
    let means: Vec<(f64, f64)> = losses.chunks(losses.len().div_ceil(COLUMNS).max(1)).map(mean).collect();
    let _ = writeln!(svg, r##"<polyline points="{}" fill="none" stroke="#a9c7e8"/>"##, line(&every));
    let _ = writeln!(svg, r##"<polyline points="{}" fill="none" stroke="#1f5fa8" stroke-width="2"/>"##, line(&means));
    svg.push_str("</svg>\n");
    svg
}

/// What was measured at some steps of several trainings, such as losses of text that was held out: names and points (step, value).
pub fn lines(title: &str, named: &[(&str, Vec<(usize, f64)>)]) -> String {
    const COLOURS: [&str; 4] = ["#1f5fa8", "#c8501e", "#3a8a3a", "#7a4fa0"];
    let points =
        |points: &[(usize, f64)]| points.iter().map(|(step, value)| (*step as f64, *value)).collect::<Vec<_>>();
    let scale = Scale::of(&named.iter().flat_map(|(_, of)| points(of)).collect::<Vec<_>>());
    let mut svg = start(LINES, title);
    scale.axes(&mut svg);
    for (i, (name, of)) in named.iter().enumerate() {
        let (colour, at) = (COLOURS[i % COLOURS.len()], TOP + 18.0 * (i + 1) as f64);
        let _ = writeln!(
            svg,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            scale.points(&points(of))
        );
        // Trainings end low: above is room for the names.
        let _ = writeln!(
            svg,
            r#"<path d="M{} {:.1}h24" stroke="{colour}" stroke-width="2"/><text x="{}" y="{at:.1}">{}</text>"#,
            WIDTH / 2.0,
            at - 4.0,
            WIDTH / 2.0 + 32.0,
            escaped(name),
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The height of a picture with lines.
const LINES: f64 = 320.0;

/// Where points (step, value) lie in a picture with lines.
struct Scale {
    low: f64,
    high: f64,
    last: f64,
}

impl Scale {
    fn of(points: &[(f64, f64)]) -> Scale {
        let last = points.iter().map(|(step, _)| *step).fold(1.0, f64::max);
        let low = points.iter().map(|(_, value)| *value).fold(f64::INFINITY, f64::min);
        let high = points.iter().map(|(_, value)| *value).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if points.is_empty() { (0.0, 1.0) } else { (low, high.max(low + 1e-6)) };
        Scale { low, high, last }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * step / self.last
    }

    fn y(&self, value: f64) -> f64 {
        TOP + (LINES - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)
    }

    fn points(&self, points: &[(f64, f64)]) -> String {
        let point = |(step, value): &(f64, f64)| format!("{:.1},{:.1}", self.x(*step), self.y(*value));
        points.iter().map(point).collect::<Vec<_>>().join(" ")
    }

    fn axes(&self, svg: &mut String) {
        for i in 0..=4 {
            let value = self.low + (self.high - self.low) * f64::from(i) / 4.0;
            let _ = writeln!(
                svg,
                r##"<path d="M{LEFT} {0:.1}H{1}" stroke="#ddd"/><text x="{2}" y="{3:.1}" text-anchor="end">{value:.3}</text>"##,
                self.y(value),
                WIDTH - RIGHT,
                LEFT - 8.0,
                self.y(value) + 4.0,
            );
        }
        steps_axis(svg, LINES, self.last, |step| self.x(step));
    }
}

/// How often each head or expert of each layer is on, in the course of the training: white for never, dark for always.
pub fn heads(history: &History) -> String {
    const ROW: f64 = 9.0;
    const GAP: f64 = 8.0;
    let loads = history.loads();
    let mut layers: Vec<&str> = Vec::new();
    for load in loads {
        if !layers.contains(&load.layer.as_str()) {
            layers.push(&load.layer);
        }
    }
    let steps: Vec<usize> = loads.iter().map(|load| load.step).collect::<BTreeSet<_>>().into_iter().collect();
    let shown: Vec<usize> = steps.iter().step_by(steps.len().div_ceil(COLUMNS).max(1)).copied().collect();
    let of_layer = |layer: &str| loads.iter().filter(move |load| load.layer == layer).collect::<Vec<&Load>>();
    let rows = |layer: &str| of_layer(layer).first().map_or(0, |load| load.shares.len());
    let height = TOP + BOTTOM + layers.iter().map(|layer| rows(layer) as f64 * ROW + GAP).sum::<f64>();
    let mut svg = start(height, "Share of the tokens that each head or expert is on for");
    let last = steps.last().copied().unwrap_or(1) as f64;
    let column = (WIDTH - LEFT - RIGHT) / shown.len().max(1) as f64;
    let mut top = TOP;
    for layer in layers {
        let count = rows(layer) as f64;
        let _ = writeln!(
            svg,
            r#"<text x="{}" y="{:.1}" text-anchor="end">{}</text>"#,
            LEFT - 8.0,
            top + count * ROW / 2.0 + 4.0,
            escaped(layer),
        );
        for load in of_layer(layer) {
            let Ok(at) = shown.binary_search(&load.step) else { continue };
            for (head, share) in load.shares.iter().enumerate() {
                let _ = writeln!(
                    svg,
                    r##"<rect x="{:.1}" y="{:.1}" width="{:.2}" height="{ROW}" fill="#1f5fa8" fill-opacity="{share:.2}"/>"##,
                    LEFT + at as f64 * column,
                    top + head as f64 * ROW,
                    column + 0.2,
                );
            }
        }
        let _ = writeln!(
            svg,
            r##"<rect x="{LEFT}" y="{top:.1}" width="{}" height="{:.1}" fill="none" stroke="#bbb"/>"##,
            WIDTH - LEFT - RIGHT,
            count * ROW,
        );
        top += count * ROW + GAP;
    }
    steps_axis(&mut svg, height, last, |step| LEFT + (WIDTH - LEFT - RIGHT) * step / last);
    svg.push_str("</svg>\n");
    svg
}

fn start(height: f64, title: &str) -> String {
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="22" font-size="14">{}</text>
"##,
        escaped(title),
    )
}

fn steps_axis(svg: &mut String, height: f64, last: f64, x: impl Fn(f64) -> f64) {
    for i in 0..=4 {
        let step = last * f64::from(i) / 4.0;
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}{step:.0}</text>"#,
            x(step),
            height - BOTTOM + 20.0,
            if i == 0 { "step " } else { "" },
        );
    }
}

/// Names of modules come from configurations.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_share_their_axes() {
        let svg = lines("a < b", &[("one", vec![(0, 3.0), (100, 1.0)]), ("two", vec![(50, 2.0)])]);
        let (left, right) = (LEFT, WIDTH - RIGHT);
        let middle = (left + right) / 2.0;
        let (top, bottom) = (TOP, LINES - BOTTOM);
        for points in
            [format!("{left:.1},{top:.1} {right:.1},{bottom:.1}"), format!("{middle:.1},{:.1}", (top + bottom) / 2.0)]
        {
            assert!(svg.contains(&format!(r#"<polyline points="{points}""#)), "{points}: {svg}");
        }
        assert!(svg.contains(">one<") && svg.contains(">two<") && svg.contains("a &lt; b"), "{svg}");
        assert_eq!(lines("nothing", &[]).matches("<polyline").count(), 0);
    }
}
