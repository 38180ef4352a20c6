//! Generated documentation is what the code says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

#[test]
fn operators_page_follows_the_schema() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operators.md");
    let page = moh_operators::markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        page,
        "UPDATE_DOCS=1 cargo test -p moh --test it docs writes the page"
    );
}

/// README's table of gains: between the comments stands what `inspect` and the measurements say.
#[test]
fn readme_table_follows_the_measurements() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- gains begin: exporter/src/measured.csv -->\n\n", "\n<!-- gains end -->");
    let start = page.find(begin).expect("the table begins") + begin.len();
    let stop = start + page[start..].find(end).expect("the table ends");
    let table = moh_export::gains::markdown().unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{}{table}{}", &page[..start], &page[stop..])).unwrap();
        return;
    }
    assert_eq!(&page[start..stop], table, "UPDATE_DOCS=1 cargo test -p moh --test it docs writes the table");
    assert!(moh_export::measured::rows().len() >= 4, "a line of measured.csv is not understood");
}

/// Code in a guide: from which file, and its lines.
struct Excerpt {
    file: PathBuf,
    lines: Vec<String>,
}

/// The indented blocks that follow "From `FILE`:".
fn excerpts(page: &str) -> Vec<Excerpt> {
    let mut excerpts: Vec<Excerpt> = Vec::new();
    // How far the block is indented in which the line before was.
    let mut block = None;
    for line in page.lines().filter(|line| !line.is_empty()) {
        let indent = line.len() - line.trim_start().len();
        if let (Some(least), Some(excerpt)) = (block, excerpts.last_mut())
            && indent >= least
        {
            block = Some(if excerpt.lines.is_empty() { indent } else { least });
            excerpt.lines.push(line.trim().to_owned());
            continue;
        }
        block = None;
        if let Some((_, file)) = line.strip_suffix("`:").and_then(|line| line.rsplit_once("rom `")) {
            excerpts.push(Excerpt { file: file.into(), lines: Vec::new() });
            block = Some(4);
        }
    }
    excerpts
}

/// A line that is not there, or not in this order; `..` stands for anything.
fn stale(excerpt: &Excerpt, source: &str) -> Option<String> {
    let mut lines = source.lines().map(str::trim);
    let missing = |line: &&String| match line.split_once("..") {
        Some(("", _)) => false,
        Some((start, _)) => !lines.any(|found| found.starts_with(start.trim_end())),
        None => !lines.any(|found| found == line.as_str()),
    };
    excerpt.lines.iter().find(missing).cloned()
}

#[test]
fn code_in_guides_is_code_of_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let page = entry.unwrap().path();
        if !page.file_name().unwrap().to_string_lossy().starts_with("adding-") {
            continue;
        }
        for excerpt in excerpts(&std::fs::read_to_string(&page).unwrap()) {
            let source = std::fs::read_to_string(root.join(&excerpt.file)).unwrap();
            assert!(!excerpt.lines.is_empty(), "{}: no code from {}", page.display(), excerpt.file.display());
            let stale = stale(&excerpt, &source);
            assert_eq!(stale, None, "{}: not in {}, or not in this order", page.display(), excerpt.file.display());
            seen += 1;
        }
    }
    assert!(seen >= 8, "found {seen} pieces of code in docs/adding-*.md");
}
