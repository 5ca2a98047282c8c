//! Tests of the source code: modules import downwards only, and every file says what it is for.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The wings, top to bottom. A wing may import wings on lower lines, never wings on its own line or above.
const LAYERS: &[&[&str]] = &[
    &["manual"],
    &["cli"],
    &["service"],
    &["runner"],
    &["gateway", "relay", "tools", "sandbox"],
    &["telemetry"],
    &["llm", "fakes"],
    &["base", "guest"],
];

/// The imports that are allowed between wings on one line: a tool's job runs in a sandbox.
const SIBLING_IMPORTS: &[(&str, &str)] = &[("tools", "sandbox")];

/// The modules of a wing, top to bottom, for wings with more than one layer.
const WING_LAYERS: &[(&str, &[&[&str]])] = &[
    ("service", &[&["api"], &["runs"], &["config"], &["billing"], &["auth", "store"]]),
    ("gateway", &[&["admin"], &["process"], &["config"], &["pipeline"], &["upstream"], &["run"]]),
    ("relay", &[&["delivery"], &["github"], &["repo"], &["git"]]),
    ("telemetry", &[&["access_log", "trace"], &["metrics"], &["audit"]]),
    ("llm", &[&["request"], &["response"], &["budget", "protocol"]]),
];

#[test]
fn wings_import_downwards_only() {
    let mut untidy = BTreeSet::new();
    for (path, text) in read_sources().into_iter().filter(|(path, _)| !is_program(path)) {
        let wing = wing_of(&path);
        let mut used = imported_modules(&text, "crate::");
        used.retain(|to| !SIBLING_IMPORTS.contains(&(wing.as_str(), to.as_str())));
        untidy.extend(upward_imports(LAYERS, &wing, used));
    }
    assert!(untidy.is_empty(), "{untidy:#?}");
}

#[test]
fn modules_of_a_wing_import_downwards_only() {
    let mut untidy = BTreeSet::new();
    for (wing, layers) in WING_LAYERS {
        for (path, text) in read_sources().into_iter().filter(|(path, _)| wing_of(path) == *wing) {
            let Some(module) = module_of(&path) else { continue };
            let used = imported_modules(&text, &format!("crate::{wing}::"));
            untidy.extend(
                upward_imports(layers, &module, used).map(|line| format!("{wing}: {line}")),
            );
        }
    }
    assert!(untidy.is_empty(), "{untidy:#?}");
}

/// Returns the imports of `module` from its own line of the table or from above.
fn upward_imports(
    layers: &'static [&'static [&'static str]],
    module: &str,
    used: BTreeSet<String>,
) -> impl Iterator<Item = String> {
    let floor = |name: &str| layers.iter().position(|layer| layer.contains(&name));
    let from = floor(module).unwrap_or_else(|| panic!("`{module}` is not in its table of layers"));
    let upward =
        used.into_iter().filter(move |to| *to != module && floor(to).is_none_or(|to| to <= from));
    upward.map(move |to| format!("{module} imports {to}")).collect::<Vec<_>>().into_iter()
}

/// The architecture page and the head of `lib.rs` draw the table of this file.
#[test]
fn the_architecture_page_draws_the_same_layers() {
    let page = fs::read_to_string("src/manual/architecture.md").unwrap();
    let drawing = page.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let modules =
        |line: &str| line.split("  ").next().unwrap().split(" · ").map(str::to_owned).collect();
    let drawn: Vec<Vec<String>> = drawing.lines().map(modules).collect();
    assert_eq!(drawn, LAYERS);
}

/// A reader who follows a walk of the architecture page finds each file.
#[test]
fn the_architecture_page_names_files_that_exist() {
    let page = fs::read_to_string("src/manual/architecture.md").unwrap();
    let named: Vec<_> = page.split('`').filter(|text| text.starts_with("src/")).collect();
    assert!(named.len() > 40, "{named:?}");
    let missing: Vec<_> = named.into_iter().filter(|path| !Path::new(path).exists()).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// A reader who searches for a name of a page finds it: files, types, functions, settings, metrics and codes. The
/// changelog names what is gone. Other projects have names of their own, and `SERVER__` is a placeholder.
#[test]
fn the_pages_name_what_exists() {
    let foreign = [
        "DEFAULT_BATCH_SIZE",
        "PR_SET_CHILD_SUBREAPER",
        "PR_SET_DUMPABLE",
        "rusqlite_migration",
        "SERVER__",
    ];
    let mut known: BTreeSet<String> = foreign.map(str::to_owned).into();
    let folders = ["src", "tests", "benches", "fuzz", "docker", "config"];
    for (_, text) in folders.into_iter().flat_map(|folder| read_files(folder, is_not_a_page)) {
        known.extend(text.split(|c| !is_ident(c)).map(str::to_owned));
    }
    let mut missing = vec![];
    let mut pages = read_files("src/manual", |path| path.extension().is_some_and(|e| e == "md"));
    pages.retain(|(path, _)| !path.ends_with("changelog.md"));
    for page in ["README.md", ".github/CONTRIBUTING.md"] {
        pages.push((page.into(), fs::read_to_string(page).unwrap()));
    }
    assert!(pages.len() > 40, "{}", pages.len());
    for (path, text) in &pages {
        let unknown = names_of_page(text).into_iter().filter(|name| !is_known(name, &known));
        missing.extend(unknown.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Returns the texts between backticks, without blocks of code.
fn names_of_page(text: &str) -> Vec<&str> {
    let mut names = vec![];
    let mut is_block = false;
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_block ^= is_fence;
        if !is_block && !is_fence {
            names.extend(line.split('`').skip(1).step_by(2));
        }
    }
    names
}

/// A path exists; each part of a name is a word of the code. Any other text is taken for known.
fn is_known(name: &str, words: &BTreeSet<String>) -> bool {
    let folders = ["src/", "tests/", "benches/", "fuzz/", "docker/", "config/", ".github/", ".ci/"];
    if folders.iter().any(|folder| name.starts_with(folder)) {
        let path = name.split(|c: char| c.is_whitespace() || c == '*').next().unwrap();
        return Path::new(path).exists();
    }
    let name = name.trim_end_matches("()");
    let is_name = name.contains('_') || name.contains("::");
    !is_name
        || !name.chars().all(|c| is_ident(c) || c == ':')
        || name.split("::").all(|part| words.contains(part))
}

const fn is_ident(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_not_a_page(path: &Path) -> bool {
    path.extension().is_none_or(|extension| extension != "md")
}

/// Names and texts follow the contributor's page, in `src` and in the code around it, and modules of one level import
/// each other in no circle. `tests/readability --list` prints every violation.
#[test]
fn names_and_texts_are_readable() {
    let counted = Command::new("tests/readability").arg("--check").output().unwrap();
    let report = String::from_utf8_lossy(&counted.stdout);
    assert!(counted.status.success(), "{report}{}", String::from_utf8_lossy(&counted.stderr));
}

/// `cogni-init` is in every sandbox and must stay small: it imports no other module and no async runtime.
#[test]
fn programs_in_a_sandbox_import_no_other_module() {
    let inside = |path: &Path| is_program(path) || wing_of(path) == "guest";
    let foreign = ["crate::", "cogni_gateway::", "tokio::"];
    let importing: Vec<_> = read_sources()
        .into_iter()
        .filter(|(path, text)| inside(path) && foreign.iter().any(|name| text.contains(name)))
        .map(path_of)
        .collect();
    assert!(importing.is_empty(), "{importing:#?}");
}

#[test]
fn every_file_says_what_it_is_for() {
    let silent: Vec<_> = read_all_code()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//!"))
        .map(path_of)
        .collect();
    assert!(silent.is_empty(), "no module doc: {silent:#?}");
}

/// A file of tests is a list of like things, so it may be longer than a file of `src`.
#[test]
fn files_stay_readable() {
    let limit = |path: &Path| if path.starts_with("src") { 600 } else { 1000 };
    let long: Vec<_> = read_all_code()
        .into_iter()
        .filter(|(path, text)| text.lines().count() > limit(path))
        .map(path_of)
        .collect();
    assert!(long.is_empty(), "split these: {long:#?}");
}

/// Few files contain `unsafe` code, and each block has its reason beside it.
#[test]
fn unsafe_code_stays_where_it_is_listed() {
    let mut found: Vec<_> = read_sources()
        .into_iter()
        .filter(|(_, text)| text.contains("unsafe {"))
        .map(|(path, text)| {
            (path, text.matches("unsafe {").count(), text.matches("// SAFETY: ").count())
        })
        .collect();
    found.sort();
    let listed = [
        ("src/base/json/string.rs", 1, 1),
        ("src/base/json/vector.rs", 3, 3),
        ("src/base/memory.rs", 1, 1),
        ("src/base/socket.rs", 3, 3),
        ("src/base/unix/peer.rs", 1, 1),
        ("src/guest/init/clean_state.rs", 2, 2),
        ("src/guest/init/cleanup.rs", 1, 1),
        ("src/guest/init/landlock.rs", 5, 5),
        ("src/guest/init/listener.rs", 2, 2),
        ("src/guest/init/reaper.rs", 5, 5),
        ("src/guest/init/seccomp.rs", 1, 1),
        ("src/guest/init/spawn.rs", 2, 2),
        ("src/relay/git/process.rs", 1, 1),
        ("src/sandbox/embedded/executor.rs", 2, 2),
        ("src/sandbox/embedded/privilege.rs", 1, 1),
        ("src/sandbox/probe/landlock.rs", 1, 1),
    ];
    assert_eq!(found, listed.map(|(path, blocks, reasons)| (path.into(), blocks, reasons)));
}

/// Unfinished work belongs in an issue, not in the code.
#[test]
fn nothing_is_left_to_do_in_the_code() {
    let marks = ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("];
    let left: Vec<_> = read_all_code()
        .into_iter()
        .filter(|(path, _)| path != Path::new(file!()))
        .filter(|(_, text)| marks.iter().any(|mark| text.contains(mark)))
        .map(|(path, _)| path)
        .collect();
    assert!(left.is_empty(), "unfinished: {left:#?}");
}

/// A reader of the table of limits can run the test beside each limit.
#[test]
fn every_limit_names_a_test_that_exists() {
    let manual = fs::read_to_string("src/manual/security.md").unwrap();
    let table = manual.split("\n| limit | ").nth(1).unwrap().split("\n\n").next().unwrap();
    let tests = table.lines().skip(2).map(|row| row.trim_end_matches(" |").rsplit("| ").next());
    let missing: Vec<_> = tests.flatten().filter(|told| !names_a_test(told)).collect();
    assert!(missing.is_empty(), "no such test: {missing:#?}");
}

/// `none` (there is no test), and `–` with a reason, are also valid.
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

/// Returns the modules named after `prefix` in code, without comments.
fn imported_modules(text: &str, prefix: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    code.split(prefix).skip(1).flat_map(first_segments).collect()
}

/// `budget::Budget;` names `budget`; `{audit::Log, run}` names `audit` and `run`.
fn first_segments(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else { return vec![leading_ident(path)] };
    let mut found = vec![];
    let (mut depth, mut start) = (0, 0);
    for (i, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.push(leading_ident(&group[start..i]));
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

fn leading_ident(text: &str) -> String {
    text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn wing_of(path: &Path) -> String {
    let first = path.strip_prefix("src").unwrap().components().next().unwrap();
    first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

/// Returns the module of its wing that a file belongs to; `None` for the wing's own file.
fn module_of(path: &Path) -> Option<String> {
    let second = path.strip_prefix("src").unwrap().components().nth(1)?;
    Some(second.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned())
}

fn path_of((path, _): (PathBuf, String)) -> PathBuf {
    path
}

fn is_source(path: &Path) -> bool {
    let is_root = ["src/main.rs", "src/lib.rs"].iter().any(|root| path == Path::new(root));
    path.extension().is_some_and(|extension| extension == "rs") && !is_root
}

/// Programs beside the library belong to no wing.
fn is_program(path: &Path) -> bool {
    path.starts_with("src/bin")
}

/// Returns every source file except the two crate roots.
fn read_sources() -> Vec<(PathBuf, String)> {
    read_folder("src")
}

/// Returns every file of Rust, of the library and of the code around it.
fn read_all_code() -> Vec<(PathBuf, String)> {
    ["src", "tests", "benches", "fuzz", "docker"].into_iter().flat_map(read_folder).collect()
}

fn read_folder(folder: &str) -> Vec<(PathBuf, String)> {
    read_files(folder, is_source)
}

/// Returns the chosen files of a folder. A file that is no text is left out.
fn read_files(folder: &str, is_chosen: impl Fn(&Path) -> bool) -> Vec<(PathBuf, String)> {
    let mut folders = vec![PathBuf::from(folder)];
    let mut found = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if is_chosen(&path)
                && let Ok(text) = fs::read_to_string(&path)
            {
                found.push((path, text));
            }
        }
    }
    found
}
