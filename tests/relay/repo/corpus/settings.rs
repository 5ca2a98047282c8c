//! Settings that the agent has given to its own git, hoping that the host's git reads them.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::{AnnouncementClaim, HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("hooks", |case| {
        for name in HOOKS {
            let hook = format!(".git/hooks/{name}");
            case.agent().write(&hook, format!("#!/bin/sh\n{}\n", case.canary()));
            let path = case.agent().path.join(&hook);
            fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        }
        commit_quietly(case)
    }),
    ("programs in the configuration", |case| {
        let canary = case.canary();
        let config: String = PROGRAMS.iter().map(|name| format_setting(name, &canary)).collect();
        configure_repository(case, &config)
    }),
    ("filters and drivers", |case| {
        let canary = case.canary();
        let config: String = DRIVERS.iter().map(|name| format_setting(name, &canary)).collect();
        case.agent().write(".git/info/attributes", "* filter=evil diff=evil merge=evil\n");
        configure_repository(case, &config)
    }),
    ("output in another form", |case| {
        let config: String =
            FORMS.iter().map(|(name, value)| format_setting(name, value)).collect();
        configure_repository(case, &config)
    }),
    ("configuration that cannot be read", |case| configure_repository(case, "[core\n")),
    ("configuration from elsewhere", |case| {
        let elsewhere = case.place.path("canary").join("config");
        configure_repository(case, &format!("[include]\n\tpath = {}\n", elsewhere.display()))
    }),
    ("worktree elsewhere", |case| {
        let config = format_setting("core.worktree", &case.place.path("").display().to_string());
        configure_repository(case, &config)
    }),
    ("partial clone", |case| {
        let canary = case.canary();
        configure_repository(
            case,
            &[
                format_setting("core.repositoryFormatVersion", "1"),
                format_setting("extensions.partialClone", "evil"),
                format_setting("remote.evil.promisor", "true"),
                format_setting("remote.evil.url", &format!("ext::sh -c \"{canary}\"")),
            ]
            .concat(),
        )
    }),
    (".git is a file", |case| {
        case.agent().write("honest.txt", "work\n");
        case.agent().commit("Work");
        let (git, moved) = (case.agent().path.join(".git"), case.agent().path.join("moved"));
        fs::rename(&git, moved).unwrap();
        fs::write(git, "gitdir: moved\n").unwrap();
        case.extract()
    }),
    (".git is gone", |case| {
        fs::remove_dir_all(case.agent().path.join(".git")).unwrap();
        case.extract()
    }),
];

/// Commits honest work, and then configures the repository.
fn configure_repository(case: &HostileCase, config: &str) -> AnnouncementClaim {
    case.agent().write("honest.txt", "work\n\n");
    case.agent().commit("Work");
    let path = case.agent().path.join(".git/config");
    fs::write(&path, fs::read_to_string(&path).unwrap() + config).unwrap();
    case.extract()
}

/// Commits without the agent's hooks, which this case does not test.
fn commit_quietly(case: &HostileCase) -> AnnouncementClaim {
    case.agent().write("honest.txt", "work\n");
    for words in [vec!["add", "-A"], vec!["commit", "-q", "-m", "Work"]] {
        case.agent().git(["-c", "core.hooksPath=/dev/null"].into_iter().chain(words));
    }
    case.extract()
}

/// Formats `a.b.c` as a section of git's configuration files.
fn format_setting(name: &str, value: &str) -> String {
    let (section, key) = name.rsplit_once('.').unwrap();
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    let head = match section.split_once('.') {
        Some((section, rest)) => format!("[{section} \"{rest}\"]"),
        None => format!("[{section}]"),
    };
    format!("{head}\n\t{key} = \"{value}\"\n")
}

const HOOKS: &[&str] = &[
    "applypatch-msg",
    "commit-msg",
    "fsmonitor-watchman",
    "post-applypatch",
    "post-checkout",
    "post-commit",
    "post-index-change",
    "post-merge",
    "post-rewrite",
    "pre-applypatch",
    "pre-auto-gc",
    "pre-commit",
    "pre-push",
    "pre-receive",
    "reference-transaction",
    "update",
];

const PROGRAMS: &[&str] = &[
    "core.fsmonitor",
    "core.pager",
    "core.editor",
    "core.askPass",
    "core.sshCommand",
    "core.gitProxy",
    "core.alternateRefsCommand",
    "pager.format-patch",
    "pager.rev-list",
    "pager.bundle",
    "diff.external",
    "gpg.program",
    "gpg.ssh.program",
    "credential.helper",
    "uploadpack.packObjectsHook",
    "sequence.editor",
    "alias.bundle",
    "alias.rev-list",
    "trailer.x.command",
];

const DRIVERS: &[&str] = &[
    "filter.evil.clean",
    "filter.evil.smudge",
    "filter.evil.process",
    "diff.evil.command",
    "diff.evil.textconv",
    "merge.evil.driver",
];

/// Each setting would change patches or lists if the relay's git did not override it.
const FORMS: &[(&str, &str)] = &[
    ("format.headers", "X-Evil: 1"),
    ("format.attach", "yes"),
    ("format.from", "Evil <evil@example.com>"),
    ("format.to", "evil@example.com"),
    ("format.cc", "evil@example.com"),
    ("format.signature", "evil"),
    ("format.coverLetter", "true"),
    ("format.thread", "true"),
    ("format.noprefix", "true"),
    ("format.numbered", "true"),
    ("format.signOff", "true"),
    ("format.mboxrd", "true"),
    ("format.pretty", "oneline"),
    ("format.subjectPrefix", "EVIL"),
    ("format.useAutoBase", "whenAble"),
    ("format.notes", "true"),
    ("format.outputDirectory", "/tmp/evil"),
    ("format.forceInBodyFrom", "true"),
    ("diff.context", "9"),
    ("diff.interHunkContext", "9"),
    ("diff.noprefix", "true"),
    ("diff.mnemonicPrefix", "true"),
    ("diff.srcPrefix", "x/"),
    ("diff.relative", "true"),
    ("diff.renames", "copies"),
    ("diff.suppressBlankEmpty", "true"),
    ("diff.algorithm", "patience"),
    ("diff.colorMoved", "zebra"),
    ("diff.wsErrorHighlight", "all"),
    ("diff.indentHeuristic", "false"),
    ("diff.statGraphWidth", "3"),
    ("diff.submodule", "log"),
    ("diff.ignoreSubmodules", "all"),
    ("color.ui", "always"),
    ("color.diff", "always"),
    ("core.abbrev", "7"),
    ("core.quotePath", "false"),
    ("core.commentChar", "x"),
    ("i18n.logOutputEncoding", "UTF-16"),
    ("i18n.commitEncoding", "ISO-8859-1"),
    ("log.showSignature", "true"),
    ("log.date", "iso"),
    ("log.mailmap", "true"),
    ("log.showRoot", "false"),
    ("log.diffMerges", "on"),
    ("notes.displayRef", "*"),
    ("bundle.version", "3"),
    ("pack.compression", "0"),
    ("rev-list.missing", "allow-any"),
];
