//! Generated documentation is what the code says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

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
        "UPDATE_DOCS=1 cargo test --test it docs writes the page"
    );
}
