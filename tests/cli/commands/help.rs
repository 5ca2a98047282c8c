//! R8: Tests of the help: it says what a command is for, not how it works inside.

use std::fmt::Write;

use clap::Command;
use cogni_gateway::cli;

use super::run_cogni;

/// The snapshot has every command with its first sentence.
#[test]
fn each_command_has_a_description() {
    let mut command = cli::command();
    command.build();
    let mut told = String::new();
    print_help("", &command, &mut told);
    insta::assert_snapshot!(told);
}

/// The snapshot has the help pages that are read most.
#[test]
fn the_main_help_pages_match_the_snapshot() {
    let commands = [
        &["--help"][..],
        &["run", "--help"],
        &["serve", "--help"],
        &["agents", "--help"],
        &["relay", "retry", "--help"],
        &["billing", "reconcile", "--help"],
        &["grant", "mint", "--help"],
        &["admin", "budget", "--help"],
    ];
    let mut told = String::new();
    for arguments in commands {
        let (code, help, said) = run_cogni(arguments, &[("COGNI_STATE_DIR", "/not/to/be/shown")]);
        assert_eq!((code, said.as_str()), (0, ""), "{arguments:?}");
        writeln!(told, "$ cogni-gateway {}\n{help}", arguments.join(" ")).unwrap();
    }
    assert!(!told.contains("/not/to/be/shown"), "the help must not show a variable's value");
    insta::assert_snapshot!(told);
}

/// `-h` and `--help` begin with the same sentence, and every flag and argument has a description.
#[test]
fn everything_has_its_help() {
    let mut command = cli::command();
    command.build();
    let mut wrong = vec![];
    check_help(&command, "cogni-gateway", &mut wrong);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn print_help(above: &str, command: &Command, told: &mut String) {
    for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
        let name = format!("{above}{}", command.get_name());
        let about = command.get_about().unwrap_or_default().to_string();
        writeln!(told, "{name:18} {about}").unwrap();
        print_help(&format!("{name} "), command, told);
    }
}

fn check_help(command: &Command, name: &str, wrong: &mut Vec<String>) {
    let about = command.get_about().unwrap_or_default().to_string();
    if about.is_empty() || about.ends_with('.') {
        wrong.push(format!("{name}: `{about}`"));
    }
    if let Some(long) =
        command.get_long_about().filter(|long| !long.to_string().starts_with(&about))
    {
        wrong.push(format!("{name}: `{about}`, but `{long}`"));
    }
    for argument in command.get_arguments() {
        let help = argument.get_help().unwrap_or_default().to_string();
        if help.is_empty() {
            wrong.push(format!("{name}: `{}` has no help", argument.get_id()));
        }
    }
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        check_help(below, &format!("{name} {}", below.get_name()), wrong);
    }
}
