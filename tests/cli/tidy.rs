//! Checks the code itself: rooms import downwards only, every file says what it is for.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Top to bottom. A room may import rooms on lower lines, never its own line or above.
const LAYERS: &[&[&str]] = &[
    &["manual"],
    &["cli"],
    &["api"],
    &["supervisor"],
    &["admin", "runner"],
    &["app"],
    &["config"],
    &["billing", "catalog"],
    &["delivery"],
    &["forge", "gateway", "provider"],
    &["relay", "stand_in"],
    &["body", "git", "upstream"],
    &["run"],
    &["grant", "journal"],
    &["sandbox", "stream", "observe"],
    &["audit"],
    &["budget", "protocol"],
    &["base"],
    &["agent", "init"],
];

/// These run in the sandbox, as programs of their own.
const INSIDE: &[&str] = &["agent", "init"];

#[test]
fn rooms_import_downwards_only() {
    let floor = |room: &str| LAYERS.iter().position(|layer| layer.contains(&room));
    let mut untidy = BTreeSet::new();
    for (path, text) in sources().into_iter().filter(|(path, _)| !is_program(path)) {
        let room = room_of(&path);
        let Some(from) = floor(&room) else {
            untidy.insert(format!("{room}: not in LAYERS"));
            continue;
        };
        for used in imports(&text) {
            if used != room && floor(&used).is_none_or(|to| to <= from) {
                untidy.insert(format!("{room} imports {used}"));
            }
        }
    }
    assert!(untidy.is_empty(), "{untidy:#?}");
}

/// Whoever reads the page on the house sees the house as it is.
#[test]
fn the_page_on_the_house_has_the_same_layers() {
    let page = fs::read_to_string("src/manual/architecture.md").unwrap();
    let drawing = page.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let rooms =
        |line: &str| line.split("  ").next().unwrap().split(" · ").map(str::to_owned).collect();
    let drawn: Vec<Vec<String>> = drawing.lines().map(rooms).collect();
    assert_eq!(drawn, LAYERS);
}

/// `cogni-init` is in every sandbox, and small: it takes nothing from other rooms, and no runtime.
#[test]
fn what_runs_in_a_sandbox_imports_no_room() {
    let inside = |path: &Path| is_program(path) || INSIDE.contains(&room_of(path).as_str());
    let foreign = ["crate::", "cogni_gateway::", "tokio::"];
    let importing: Vec<_> = sources()
        .into_iter()
        .filter(|(path, text)| inside(path) && foreign.iter().any(|name| text.contains(name)))
        .map(first)
        .collect();
    assert!(importing.is_empty(), "{importing:#?}");
}

#[test]
fn every_file_says_what_it_is_for() {
    let silent: Vec<_> =
        sources().into_iter().filter(|(_, text)| !text.starts_with("//!")).map(first).collect();
    assert!(silent.is_empty(), "no module doc: {silent:#?}");
}

#[test]
fn files_stay_readable() {
    let long: Vec<_> =
        sources().into_iter().filter(|(_, text)| text.lines().count() > 600).map(first).collect();
    assert!(long.is_empty(), "split these: {long:#?}");
}

/// `unsafe` is an exception of few files, with its reason beside it.
#[test]
fn unsafe_code_stays_where_it_is_listed() {
    let mut found: Vec<_> = sources()
        .into_iter()
        .filter(|(_, text)| text.contains("unsafe {"))
        .map(|(path, text)| {
            (path, text.matches("unsafe {").count(), text.matches("// SAFETY: ").count())
        })
        .collect();
    found.sort();
    let listed = [
        ("src/base/json/vector.rs", 2, 2),
        ("src/base/memory.rs", 1, 1),
        ("src/base/socket.rs", 3, 3),
        ("src/base/unix/peer.rs", 1, 1),
        ("src/git/process.rs", 1, 1),
        ("src/init/agent.rs", 2, 2),
        ("src/init/filter.rs", 1, 1),
        ("src/init/landlock.rs", 5, 5),
        ("src/init/listener.rs", 2, 2),
        ("src/init/resident.rs", 2, 2),
        ("src/init/supervisor.rs", 5, 5),
        ("src/init/wipe.rs", 1, 1),
        ("src/sandbox/embedded/payload.rs", 2, 2),
        ("src/sandbox/embedded/privilege.rs", 1, 1),
        ("src/sandbox/probe/landlock.rs", 1, 1),
    ];
    assert_eq!(found, listed.map(|(path, blocks, reasons)| (path.into(), blocks, reasons)));
}

/// What is left to do stands in an issue, not in the code.
#[test]
fn nothing_is_left_to_do_in_the_code() {
    let marks = ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("];
    let left: Vec<_> = sources()
        .into_iter()
        .filter(|(_, text)| marks.iter().any(|mark| text.contains(mark)))
        .map(|(path, _)| path)
        .collect();
    assert!(left.is_empty(), "unfinished: {left:#?}");
}

/// Whoever reads the table of limits can run the test beside each.
#[test]
fn every_limit_names_a_test_that_exists() {
    let manual = fs::read_to_string("src/manual/security.md").unwrap();
    let table = manual.split("\n| limit | ").nth(1).unwrap().split("\n\n").next().unwrap();
    let tests = table.lines().skip(2).map(|row| row.trim_end_matches(" |").rsplit("| ").next());
    let missing: Vec<_> = tests.flatten().filter(|told| !names_a_test(told)).collect();
    assert!(missing.is_empty(), "no such test: {missing:#?}");
}

/// `none`, where there is none, and `–` with the reason are answers, too.
fn names_a_test(told: &str) -> bool {
    let test = told.strip_prefix('`').and_then(|rest| rest.split('`').next());
    test.map_or(told == "none" || told.starts_with("– "), is_test)
}

fn is_test(path: &str) -> bool {
    let Some((module, name)) = path.rsplit_once("::") else { return false };
    let file = format!("{}.rs", module.replace("::", "/"));
    let binaries = fs::read_dir("tests").unwrap().map(|entry| entry.unwrap().path());
    binaries
        .chain([PathBuf::from("src")])
        .filter_map(|binary| fs::read_to_string(binary.join(&file)).ok())
        .any(|text| text.contains(&format!("fn {name}(")))
}

/// The rooms named after `crate::` in code, comments left out.
fn imports(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    code.split("crate::").skip(1).flat_map(first_segments).collect()
}

/// `budget::Budget;` names `budget`; `{audit::Log, run}` names `audit` and `run`.
fn first_segments(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else { return vec![ident(path)] };
    let mut found = vec![];
    let (mut depth, mut start) = (0, 0);
    for (i, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.push(ident(&group[start..i]));
                start = i + 1;
                if c == '}' {
                    break;
                }
            }
            _ => (),
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

fn ident(text: &str) -> String {
    text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn room_of(path: &Path) -> String {
    let first = path.strip_prefix("src").unwrap().components().next().unwrap();
    first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

fn first((path, _): (PathBuf, String)) -> PathBuf {
    path
}

fn is_source(path: &Path) -> bool {
    let is_root = ["src/main.rs", "src/lib.rs"].iter().any(|root| path == Path::new(root));
    path.extension().is_some_and(|extension| extension == "rs") && !is_root
}

/// Programs beside the library are no rooms.
fn is_program(path: &Path) -> bool {
    path.starts_with("src/bin")
}

/// Every source file but the two crate roots.
fn sources() -> Vec<(PathBuf, String)> {
    let mut folders = vec![PathBuf::from("src")];
    let mut found = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if is_source(&path) {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}
