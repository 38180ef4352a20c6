//! Routes as a picture in SVG, which follows the reader's choice of light or dark colours.

use super::LayerRoutes;
use std::fmt::Write;

/// What the tokens are.
#[derive(Debug, Clone)]
pub enum Subject {
    /// Pieces of a text.
    Text(Vec<String>),
    /// Patches of an image, a PNG file if it can be shown.
    Image(Option<Vec<u8>>),
}

const WIDTH: usize = 980;
const MARGIN: usize = 24;
/// Where what stands right of the layers' names begins.
const LEFT: usize = 230;
/// Characters of a layer's name.
const LABEL: usize = 30;
/// Room for the active share and the imbalance.
const RIGHT: usize = 190;
/// Width of a token's column.
const COLUMN: usize = 14;
/// Rows of tokens; a longer text is cut.
const ROWS: usize = 4;
/// Side of an image's map, and the space around it.
const MAP: (usize, usize) = (64, 12);
/// Opacities of gates from small to large.
const LEVELS: [f64; 4] = [0.4, 0.6, 0.8, 1.0];

const STYLE: &str = "
svg { font-family: system-ui, Helvetica, Arial, 'DejaVu Sans', sans-serif; font-size: 12px }
.page { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e } .empty { fill: #eaeef2 } .heat { fill: #0a66c2 }
.bright { fill: #ffffff } .frame { fill: none; stroke: #1f2328 }
.h1 { font-size: 18px; font-weight: 600 } .h2 { font-size: 14px; font-weight: 600 } .small { font-size: 10px }
.mono { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; font-size: 11px }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 } .empty { fill: #1c2530 } .heat { fill: #58a6ff }
.bright { fill: #0d1117 } .frame { stroke: #f0f6fc }
}
";

/// The picture: how many tokens use each head of each layer, how evenly, and which heads each token uses.
pub fn svg(title: &str, layers: &[LayerRoutes], subject: &Subject) -> String {
    let mut page = Page { body: String::new(), y: MARGIN };
    page.y += 14;
    page.text(MARGIN, "text h1", title);
    page.y += 34;
    page.heat_map(layers);
    match subject {
        Subject::Text(tokens) => page.strips(layers, tokens),
        Subject::Image(png) => page.maps(layers, png.as_deref()),
    }
    let height = page.y + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n<rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\"/>\n{}</svg>\n",
        escaped(title),
        page.body
    )
}

struct Page {
    body: String,
    /// Where the next thing goes.
    y: usize,
}

impl Page {
    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    fn text(&mut self, x: usize, class: &str, text: &str) {
        let y = self.y;
        self.add(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escaped(text)));
    }

    fn centred(&mut self, x: f64, y: usize, class: &str, text: &str) {
        self.add(format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>",
            escaped(text)
        ));
    }

    fn label(&mut self, y: usize, path: &str) {
        let skipped = path.chars().count().saturating_sub(LABEL);
        let tail: String = path.chars().skip(skipped).collect();
        let shown = if skipped > 0 { format!("…{tail}") } else { tail };
        self.add(format_args!("<text class=\"text mono\" x=\"{MARGIN}\" y=\"{y}\">{}</text>", escaped(&shown)));
    }

    fn heading(&mut self, title: &str, explanation: &str) {
        self.text(MARGIN, "text h2", title);
        self.y += 18;
        self.text(MARGIN, "quiet", explanation);
        self.y += 14;
    }

    fn heat_map(&mut self, layers: &[LayerRoutes]) {
        self.heading(
            "Share of the tokens that use each head",
            "Full colour: every token; empty: none; framed: shared by all. Imbalance of the heads that tokens choose: standard deviation over mean.",
        );
        let most = layers.iter().map(LayerRoutes::heads).max().unwrap_or(1);
        let cell = ((WIDTH - MARGIN - LEFT - RIGHT) / most).clamp(6, 40);
        let step = if cell >= 16 { 1 } else { 4 };
        let (active, imbalance) = (WIDTH - MARGIN - RIGHT + 20, WIDTH - MARGIN);
        self.y += 14;
        let y = self.y;
        for head in (0..most).step_by(step) {
            self.centred((LEFT + head * cell) as f64 + cell as f64 / 2.0, y, "quiet small", &head.to_string());
        }
        self.text(active, "quiet small", "heads in use");
        self.add(format_args!(
            "<text class=\"quiet small\" x=\"{imbalance}\" y=\"{y}\" text-anchor=\"end\">imbalance</text>"
        ));
        self.y += 6;
        for layer in layers {
            let (y, base) = (self.y, self.y + 15);
            self.label(base, &layer.path);
            let shared = layer.shared();
            for head in 0..layer.heads() {
                let (x, share) = (LEFT + head * cell, layer.share(head));
                let width = cell - 2;
                self.add(format_args!("<rect class=\"empty\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"20\"/>"));
                self.add(format_args!(
                    "<rect class=\"heat\" fill-opacity=\"{share:.3}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"20\"/>"
                ));
                if shared.contains(&head) {
                    self.add(format_args!(
                        "<rect class=\"frame\" x=\"{x}.5\" y=\"{y}.5\" width=\"{}\" height=\"19\"/>",
                        width - 1
                    ));
                }
                if cell >= 30 {
                    let class = if share > 0.6 { "bright small" } else { "text small" };
                    let middle = x as f64 + width as f64 / 2.0;
                    self.centred(middle, y + 14, class, &format!("{:.0}", 100.0 * share));
                }
            }
            let length = 70.0 * layer.active();
            self.add(format_args!("<rect class=\"empty\" x=\"{active}\" y=\"{}\" width=\"70\" height=\"8\"/>", y + 6));
            self.add(format_args!(
                "<rect class=\"heat\" x=\"{active}\" y=\"{}\" width=\"{length:.1}\" height=\"8\"/>",
                y + 6
            ));
            let percent = format!("{:.0} %", 100.0 * layer.active());
            self.add(format_args!(
                "<text class=\"text small\" x=\"{}\" y=\"{}\">{percent}</text>",
                active + 76,
                y + 14
            ));
            let uneven = layer.imbalance().map_or("–".to_owned(), |imbalance| format!("{imbalance:.2}"));
            self.add(format_args!(
                "<text class=\"text small\" x=\"{imbalance}\" y=\"{}\" text-anchor=\"end\">{uneven}</text>",
                y + 14
            ));
            self.y += 22;
        }
        self.y += 30;
    }

    fn strips(&mut self, layers: &[LayerRoutes], tokens: &[String]) {
        let fits = (WIDTH - MARGIN - LEFT) / COLUMN;
        let (shown, all) = (tokens.len().min(ROWS * fits), tokens.len());
        let cut = if shown < all { format!(" The first {shown} of {all} tokens.") } else { String::new() };
        let explanation = format!("A row a head, 0 at the top; the stronger the colour, the larger the gate.{cut}");
        self.heading("Heads of each token", &explanation);
        for (row, chunk) in tokens[..shown].chunks(fits).enumerate() {
            let height = 8 + 7 * chunk.iter().map(|token| shortened(token).chars().count()).max().unwrap_or(1);
            self.y += height;
            for (i, token) in chunk.iter().enumerate() {
                let (x, y) = (LEFT + i * COLUMN + 10, self.y - 4);
                self.add(format_args!(
                    "<text class=\"text mono\" transform=\"translate({x} {y}) rotate(-90)\">{}</text>",
                    escaped(&shortened(token))
                ));
            }
            for layer in layers {
                let heads = layer.heads();
                let cell = if heads <= 8 {
                    8
                } else if heads <= 16 {
                    5
                } else {
                    3
                };
                let (y, height) = (self.y, heads * cell);
                self.label(y + height / 2 + 4, &layer.path);
                let width = chunk.len() * COLUMN - 1;
                self.add(format_args!(
                    "<rect class=\"empty\" x=\"{LEFT}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
                ));
                let first = row * fits;
                self.add(format_args!("<g transform=\"translate({LEFT} {y}) scale({COLUMN} {cell})\">"));
                self.cells(layer, chunk.len().min(layer.tokens().saturating_sub(first)), heads, 0.06, |x, head| {
                    (first + x, head)
                });
                self.add(format_args!("</g>"));
                self.y += height + 8;
            }
            self.y += 12;
        }
    }

    fn maps(&mut self, layers: &[LayerRoutes], png: Option<&[u8]>) {
        let explanation = "A map a head, over the layer's patches; the stronger the colour, the larger the gate.";
        self.heading("Where in the image each head is used", explanation);
        if let Some(png) = png {
            let (y, data) = (self.y, base64(png));
            self.add(format_args!(
                "<image x=\"{LEFT}\" y=\"{y}\" width=\"128\" height=\"128\" image-rendering=\"pixelated\" \
                 href=\"data:image/png;base64,{data}\"/>"
            ));
            self.label(y + 70, "what the model sees");
            self.y += 144;
        }
        let (side, gap) = MAP;
        let fits = (WIDTH - MARGIN - LEFT) / (side + gap);
        for layer in layers {
            let grid = layer.tokens().isqrt();
            if grid * grid != layer.tokens() {
                continue;
            }
            let y = self.y;
            self.label(y + side / 2, &layer.path);
            let patches = format!("{grid} x {grid} patches");
            let below = y + side / 2 + 16;
            self.add(format_args!("<text class=\"quiet small\" x=\"{MARGIN}\" y=\"{below}\">{patches}</text>"));
            for head in 0..layer.heads() {
                let (x, y) = (LEFT + head % fits * (side + gap), self.y + head / fits * (side + 24));
                self.add(format_args!(
                    "<rect class=\"empty\" x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\"/>"
                ));
                let scale = side as f64 / grid as f64;
                self.add(format_args!(
                    "<g transform=\"translate({x} {y}) scale({scale:.4})\" shape-rendering=\"crispEdges\">"
                ));
                self.cells(layer, grid, grid, 0.0, |x, y| (y * grid + x, head));
                self.add(format_args!("</g>"));
                let caption = format!("{head}: {:.0} %", 100.0 * layer.share(head));
                self.centred(x as f64 + side as f64 / 2.0, y + side + 13, "quiet small", &caption);
            }
            self.y += layer.heads().div_ceil(fits) * (side + 24) + 8;
        }
    }

    /// Cells of size 1 with `gap` between columns, for those of `columns` by `rows` whose gate is not 0: `at` gives the token
    /// and the head of a column and row.
    fn cells(
        &mut self,
        layer: &LayerRoutes,
        columns: usize,
        rows: usize,
        gap: f64,
        at: impl Fn(usize, usize) -> (usize, usize),
    ) {
        let gate = |column: usize, row: usize| {
            let (token, head) = at(column, row);
            layer.gate(token, head).abs()
        };
        let largest = (0..rows).flat_map(|row| (0..columns).map(move |column| gate(column, row))).fold(0f32, f32::max);
        let level = |column: usize, row: usize| match gate(column, row) {
            0.0 => None,
            gate => Some(((gate / largest * LEVELS.len() as f32).ceil() as usize).clamp(1, LEVELS.len()) - 1),
        };
        let mut paths = [const { String::new() }; LEVELS.len()];
        for row in 0..rows {
            let mut column = 0;
            while column < columns {
                let found = level(column, row);
                // Neighbours without a gap are one cell.
                let same = (column..columns).take_while(|&next| level(next, row) == found).count();
                let run = if gap == 0.0 { same } else { 1 };
                if let Some(level) = found {
                    let width = run as f64 - gap;
                    let _ = write!(paths[level], "M{column} {row}h{width}v{}h-{width}z", 1.0 - gap);
                }
                column += run;
            }
        }
        for (path, opacity) in paths.iter().zip(LEVELS).filter(|(path, _)| !path.is_empty()) {
            self.add(format_args!("<path class=\"heat\" fill-opacity=\"{opacity}\" d=\"{path}\"/>"));
        }
    }
}

/// A token as short text.
fn shortened(token: &str) -> String {
    const LONGEST: usize = 10;
    let visible: String = token
        .chars()
        .map(|c| match c {
            ' ' => '·',
            '\n' => '⏎',
            c if c.is_control() => '?',
            c => c,
        })
        .collect();
    if visible.chars().count() > LONGEST { visible.chars().take(LONGEST - 1).chain(['…']).collect() } else { visible }
}

/// Text in XML, without what XML cannot hold.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '&' => out += "&amp;",
            '"' => out += "&quot;",
            c if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

/// RFC 4648.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0u32, |word, i| word << 8 | u32::from(chunk.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, expected) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }

    #[test]
    fn neighbours_with_the_same_gate_are_one_cell() {
        let gates = [1.0, 1.0, 0.0, 0.1].to_vec();
        let layer = LayerRoutes::new("block<1>", 1, gates, None).unwrap();
        let text = svg("a & b", std::slice::from_ref(&layer), &Subject::Image(None));
        assert!(text.contains("d=\"M0 0h2v1h-2z\"") && text.contains("d=\"M1 1h1v1h-1z\""), "{text}");
        assert!(text.contains("block&lt;1&gt;") && text.contains("a &amp; b") && text.contains("0: 75 %"), "{text}");
        let tokens = ["a", " b", "c\n", "<d>"].map(str::to_owned).to_vec();
        let text = svg("t", &[layer], &Subject::Text(tokens));
        assert!(text.contains(">·b<") && text.contains(">c⏎<") && text.contains(">&lt;d&gt;<"), "{text}");
    }
}
