//! Quality over time as an SVG picture.

use std::fmt::Write;

/// A model's place in the picture.
pub(crate) struct Point {
    pub(crate) name: &'static str,
    pub(crate) ms: f64,
    /// The measure of each seed.
    pub(crate) values: Vec<f64>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 40.0;
const LINES: usize = 4;

/// A point a model at the mean of its seeds, with a line from the least to the largest. Better is left and below.
pub(crate) fn quality(title: &str, points: &[Point]) -> String {
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="22" font-size="14">{title}</text>
"##
    );
    let range = |values: Vec<f64>| {
        let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(*v), high.max(*v)));
        let margin = 0.08 * (high - low).max(1e-6);
        (low - margin, high + margin)
    };
    let (left, right) = range(points.iter().map(|point| point.ms).collect());
    let (low, high) = range(points.iter().flat_map(|point| point.values.clone()).collect());
    let x = |ms: f64| LEFT + (WIDTH - LEFT - RIGHT) * (ms - left) / (right - left);
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
    for i in 0..=LINES {
        let share = i as f64 / LINES as f64;
        let (value, ms) = (low + share * (high - low), left + share * (right - left));
        let (across, up, end) = (x(ms), y(value), WIDTH - RIGHT);
        let _ = writeln!(svg, r##"<path d="M{LEFT} {up:.1}H{end:.1}" stroke="#ddd"/>"##);
        let (beside, beneath) = (LEFT - 8.0, HEIGHT - BOTTOM + 20.0);
        let _ = writeln!(svg, r#"<text x="{beside}" y="{:.1}" text-anchor="end">{value:.3}</text>"#, up + 4.0);
        let _ = writeln!(svg, r#"<text x="{across:.1}" y="{beneath}" text-anchor="middle">{ms:.2} ms</text>"#);
    }
    // Names beside each other are moved apart, from above to below.
    let mut order: Vec<&Point> = points.iter().collect();
    order.sort_by(|a, b| y(mean(a)).total_cmp(&y(mean(b))));
    let mut named: Vec<(f64, f64)> = Vec::new();
    for point in order {
        let (across, up) = (x(point.ms), y(mean(point)));
        let (least, largest) = point.values.iter().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
        let _ = writeln!(
            svg,
            r##"<path d="M{across:.1} {:.1}V{:.1}" stroke="#a9c7e8" stroke-width="2"/>"##,
            y(least),
            y(largest)
        );
        let _ = writeln!(svg, r##"<circle cx="{across:.1}" cy="{up:.1}" r="4" fill="#1f5fa8"/>"##);
        let mut at = up + 4.0;
        while let Some((_, taken)) =
            named.iter().find(|(other, taken)| (other - across).abs() < 110.0 && (taken - at).abs() < 12.0)
        {
            at = taken + 12.5;
        }
        named.push((across, at));
        let _ = writeln!(svg, r#"<text x="{:.1}" y="{at:.1}">{}</text>"#, across + 8.0, point.name);
    }
    svg.push_str("</svg>\n");
    svg
}

fn mean(point: &Point) -> f64 {
    point.values.iter().sum::<f64>() / point.values.len().max(1) as f64
}
