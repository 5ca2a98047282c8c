//! Tests of the links in texts for readers: each leads to a file and a heading, in a forge and in the crate's documentation.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// In the crate's documentation, these definitions precede each page's own.
const RUSTDOC_LINKS: &str = "src/manual/rustdoc_links.md";

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut wrong = Vec::new();
    let mut checked = 0;
    for page in list_pages() {
        let text = without_code(&fs::read_to_string(&page).unwrap());
        let definitions = read_definitions(&text);
        let mut targets: Vec<_> = definitions.values().copied().collect();
        targets.extend(texts_between(&text, "](", ')'));
        for target in targets.into_iter().filter(|target| !target.starts_with("https://")) {
            checked += 1;
            if !leads_somewhere(&page, target) {
                wrong.push(format!("{}: {target}", page.display()));
            }
        }
        for label in texts_between(&text, "][", ']') {
            if !definitions.contains_key(label) {
                wrong.push(format!("{}: [{label}] has no definition at the end", page.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} links were found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The labels of the manual's pages are those of the crate's documentation, where rustdoc checks what they lead to.
#[test]
fn the_manuals_labels_have_a_target_in_the_crates_documentation() {
    let known = fs::read_to_string(RUSTDOC_LINKS).unwrap();
    let known = read_definitions(&known);
    let mut used = BTreeMap::new();
    for page in list_pages().into_iter().filter(|page| page.starts_with("src/manual")) {
        let text = fs::read_to_string(&page).unwrap();
        used.extend(
            read_definitions(&text).into_keys().map(|label| (label.to_owned(), page.clone())),
        );
    }
    assert!(used.len() > 40, "{used:?}");
    let unknown: Vec<_> =
        used.iter().filter(|(label, _)| !known.contains_key(label.as_str())).collect();
    assert!(unknown.is_empty(), "{RUSTDOC_LINKS} lacks {unknown:#?}");
    let unused: Vec<_> = known.keys().filter(|label| !used.contains_key(**label)).collect();
    assert!(unused.is_empty(), "no page has these links of {RUSTDOC_LINKS}: {unused:#?}");
}

/// Lists README, the contributor's pages and the manual.
fn list_pages() -> Vec<PathBuf> {
    let mut pages = vec![PathBuf::from("README.md")];
    for directory in [".github", "src/manual", "src/manual/decisions"] {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let is_page = path.extension().is_some_and(|extension| extension == "md");
            if is_page && path != Path::new(RUSTDOC_LINKS) {
                pages.push(path);
            }
        }
    }
    pages
}

/// Reads the lines `[label]: target`.
fn read_definitions(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ")).collect()
}

/// Finds what stands between `open` and `close`.
fn texts_between<'a>(text: &'a str, open: &'a str, close: char) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).filter_map(move |rest| Some(rest.split_once(close)?.0))
}

fn leads_somewhere(page: &Path, target: &str) -> bool {
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = match file {
        "" => page.to_owned(),
        file => page.parent().unwrap().join(file),
    };
    if heading.is_empty() {
        return path.exists();
    }
    fs::read_to_string(path).is_ok_and(|text| {
        without_blocks(&text).lines().any(|line| {
            line.strip_prefix('#')
                .is_some_and(|line| heading_anchor(line.trim_start_matches('#')) == heading)
        })
    })
}

/// Makes the anchor of a heading, as forges and rustdoc do.
fn heading_anchor(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
    heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

fn without_blocks(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// Removes fenced blocks and code in lines, where brackets are no links.
fn without_code(text: &str) -> String {
    let prose = without_blocks(text);
    let line = |line: &str| line.split('`').step_by(2).collect::<Vec<_>>().join("`");
    prose.lines().map(|text| line(text) + "\n").collect()
}
